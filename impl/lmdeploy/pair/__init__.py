"""LMDeploy's prefill and decode server, joined by its migration of KV.

`pulled`: the decode server's migration loop, its transfers and messages; `server`: one of the two servers;
`driver`: commands to both, and the facts of the pair.
"""
