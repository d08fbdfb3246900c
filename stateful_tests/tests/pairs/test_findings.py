"""Known faults of vLLM as a pair: their traces, the sentence that explains each, and its page."""

import pytest

from ci.explain import because
from ci.report import report_data
from ci.report.pages import trace_page
from impl.vllm.api import RELEASES
from stateful_tests.lockstep import known_faults
from stateful_tests.lockstep.replays import replay
from stateful_tests.lockstep.system_names import resolve
from stateful_tests.tests.support.night import NIGHT
from stateful_tests.traces import trace_files as traces

TRACES = [
    each
    for each in known_faults.traces("vllm")
    if "pair" in known_faults.ways_of(each[0].parent.name)
]
SAID = {
    "a_window_lacks_the_block_that_the_last_token_of_a_prompt_reads":
        "r2 at [0, 1) of group 0 of D has the null block since command 4 (advance D); the query at 2 sees",
    "a_pushed_prompt_is_written_from_its_start_behind_a_hit":
        "transfer 0 moved block 1 of P into block 2 of D in command 14 (land)",
    "an_abort_before_the_handshake_leaves_the_prompt_to_the_lease":
        "it keeps it until the lease ends, where P gives back what r1 left, for nobody will read it",
    "an_abort_before_the_handshake_keeps_another_prompt_waiting": "r3 is WAITING with 3 tokens",
    "two_readers_of_an_answer_and_the_first_frees_it":
        "block 1 of P is free since command 10",
    "an_abort_before_the_registration_leaves_its_metadata": "D recving_metadata: r2, where no record",
    "a_load_waits_for_a_block_that_no_pool_has": "no batch comes, with 3 blocks free and r2 WAITING",
    "a_null_block_of_a_window_is_sent_and_published":
        "transfer 0 moved block 0 and 2 of P into block 1 of D in command 7 (land)",
    "a_null_block_of_a_window_is_sent_in_the_place_of_kv": "transfer 0 moved block 0 and 3 of P into block 1",
    "a_partial_hit_reads_the_end_of_another_prompt_part": "transfer 0 moved block 2 and 3 of P into block 2",
    "a_read_after_the_lease_counts": "transfer 0 moved block 1 of P into block 1 of D",
    "a_read_after_the_lease_finds_what_is_written_meanwhile":
        "it was written, where D: chunk 1 stays as it is until transfer 0 has read it",
    "a_failed_transfer_of_a_window_counts_as_received": "nobody has written block 1; the query at 2 sees",
    "an_abort_before_the_read_leaves_its_metadata": "D recving_metadata: r2, where no record",
    "an_abort_on_the_prefill_server_is_not_told": "nothing has changed; P has 2 blocks free, D has 1 blocks",
    "a_later_reader_of_an_answer_reads_what_is_written_since":
        "where D counts 1 tokens of r4 as sent by P",
    "a_failed_read_waits_for_blocks_of_one_behind_it":
        "no batch comes, with 8 blocks free and r3 WAITING, r4 WAITING_FOR_REMOTE_KVS",
    "a_renewed_lease_keeps_an_ended_one_behind_it": "where P gives back what r3 left",
    "a_renewed_lease_of_a_pulled_prompt_keeps_an_ended_one_behind_it": "where P gives back what r3 left",
    "a_load_of_one_block_waits_for_those_of_its_drafts": "no batch comes, with 2 blocks free and r2 WAITING",
    "a_write_that_fails_ends_the_prefill_server": "not found in recving_metadata list",
    "a_registration_that_waits_past_the_lease_is_not_answered":
        "r2 at D WAITING_FOR_REMOTE_KVS",
    "a_registration_after_the_lease_is_not_answered": "r2 at D WAITING_FOR_REMOTE_KVS",
    "a_handshake_that_fails_is_not_told": "r2 at D WAITING_FOR_REMOTE_KVS",
    "a_pushed_prompt_keeps_its_blocks_until_the_lease_ends": "where P gives back what r1 left",
    "a_received_request_waits_behind_one_of_higher_priority":
        "no batch comes, with 5 blocks free and r2 WAITING_FOR_REMOTE_KVS, r3 WAITING",
    "a_full_hit_of_a_state_leaves_the_prompt_to_the_lease": "where P gives back what r1 left",
    "a_full_hit_of_a_pushed_prompt_is_never_told": "where P gives back what r1 left",
    "a_full_hit_whose_handshake_fails_ends_the_decode_server": "assert req_id in self.requests",
    "a_decode_preempted_in_its_own_step_leaves_a_published_state":
        "block 4 holds the state that its hash in group 1 is of",
    "a_drafter_sees_the_last_token_behind_a_chunk_of_a_prefill_server":
        "the drafter of r1 finds its KV at position 1",
    "a_drafter_of_a_pair_skips_a_batch_with_a_text_near_the_limit": "D: block 13 holds none of it there",
    "a_block_that_a_hit_has_left_out_is_found_again_in_a_pair":
        "the drafter of r3 finds its KV at position 1",
    "a_block_that_a_hit_has_left_out_is_found_again_beside_the_network": "the drafter of r3 finds its KV",
    "a_step_behind_a_prompt_of_a_pair_names_the_running_state":
        "r1 left the state after its token 2 in block 2",
    "a_prompt_that_is_cut_behind_a_hit_ends_the_prefill_server": "assert num_new_tokens > 0",
    "a_failed_handshake_of_a_state_counts_as_received": "D counts 1 tokens of r2 as sent by P",
    "a_full_hit_leaves_its_metadata": "D recving_metadata: r3, where no record",
    "a_full_hit_of_a_pushed_prompt_leaves_its_metadata": "D recving_metadata: r3, where no record",
    "a_padded_round_of_a_pair_is_cut_at_a_block_of_state": "no token of r2 is due",
    "a_padded_round_behind_a_load_is_cut_at_a_block_of_state": "no token of r3 is due",
    "a_prompt_without_its_last_token_leaves_the_drafter_a_guess":
        "transfer 0 moved block 1 of P into block 1 of D",
    "a_request_preempted_in_its_own_step_leaves_a_published_block": "slot 0 of block 8 is not written",
}  # fmt: skip


def last_release_of(fault):
    """The newest release that has a fault."""
    return [version for version in RELEASES if fault.is_in(version)][-1]


@pytest.fixture(scope="module")
def pair():
    systems = {}

    def of(version):
        if version not in systems:
            systems[version] = resolve(f"vllm=={version}+pair")
        return systems[version]

    yield of
    for system in systems.values():
        system.close()


@pytest.mark.parametrize(("path", "fault"), TRACES, ids=lambda each: getattr(each, "stem", ""))
def test_a_trace_violates_its_clause_in_its_last_step(pair, path, fault):
    trace = traces.load(path)
    newest = last_release_of(fault)
    own = path.parent.name.removeprefix("vllm-").removesuffix("+pair")
    for version in (own, newest) if NIGHT else (newest,):
        violation = replay(pair(version), trace).violation
        assert violation is not None
        assert trace.clause in violation.clauses and trace.clause in fault.clauses
        assert violation.step == len(trace.commands) - 1


@pytest.mark.parametrize(("path", "fault"), TRACES, ids=lambda each: getattr(each, "stem", ""))
def test_the_reason_is_a_sentence_and_the_page_has_both_servers(pair, path, fault):
    run = replay(pair(last_release_of(fault)), traces.load(path))
    explained = because(run)
    assert SAID[path.stem] in explained.text
    drawn = trace_page.page(report_data.replay_data(str(path), run) | {"replay": "kvspec replay"}, run)
    assert "the pool of P" in drawn and "the pool of D, and the wire between" in drawn


def test_every_trace_has_a_sentence():
    assert SAID.keys() == {path.stem for path, _ in TRACES}
