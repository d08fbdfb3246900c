"""One pool of ref-counted blocks that groups of layers share: what an engine that schedules by itself must
keep.

Nothing here says what a scheduler should choose. `config`, `commands` and `facts` are the vocabulary;
`presets` are tiny sizes. `reference.recurrent_states` has what a recurrent layer keeps instead of KV.
`request_texts` follows texts and lengths from what was scheduled and sampled. `clauses` check the facts.
"""
