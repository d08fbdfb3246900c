"""How a violation of an engine is reported: a sentence, a page, a story, a unit test, a fixture."""

import json
import re

import pytest

from ci.explain import because
from ci.export import engine_test
from ci.export.recorded_run import NotExportable
from ci.report import report_data as report
from ci.report.pages import trace_page
from impl.process.run_test import FAILS, outcomes
from reference.blocks.clauses import BLOCK_CLAUSES
from reference.system_kinds import BLOCKS
from stateful_tests.lockstep.replays import replay
from stateful_tests.tests.report.test_page import Reader
from stateful_tests.tests.support.modules_run import printed_by
from stateful_tests.tests.support.night import at_night, some_at_night
from stateful_tests.tests.support.planted_faults import config_of, planted_faults
from stateful_tests.tests.vllm.test_releases import TRACES
from stateful_tests.traces import trace_files as traces

SAID = {
    "a_failed_load_stays_cached_after_an_abort": "a load that failed has left block 1 empty, in command 2",
    "a_preempted_request_leaves_a_failed_load_cached": "a load that failed has left block 3 empty",
    "a_failed_load_stays_cached_after_an_abort_in_flight": "slot 0 of block 1 is not written",
    "a_failed_load_stays_cached_after_a_preemption": "slot 0 of block 6 is not written",
    "a_failed_load_stays_cached_after_a_reset": "a load that failed has left block 1 empty, in command 2",
    "a_sharer_of_a_failed_load_keeps_its_hash": "slot 0 of block 3 is not written",
    "a_sharer_runs_ahead_of_the_recompute": "block 2 holds nothing of this group there",
    "a_failed_load_leaves_a_placeholder": "other tokens, or none, where r1 computes its text at [0, 4)",
    "a_step_ahead_of_a_failed_load_is_answered": "where r1 gets []",
    "a_sharer_ahead_of_a_failed_load_keeps_its_hash": "slot 0 of block 3 is not written",
    "a_sharer_ahead_of_a_failed_load_ends_and_keeps_its_hash": "slot 0 of block 3 is not written",
    "a_session_between_turns_makes_a_chunk_preempt_itself_for_ever": "after 4 forward passes in 6 calls",
    "a_session_between_turns_makes_another_preempt_itself_for_ever":
        "after 2 forward passes in 4 calls of the",
    "a_block_of_a_window_stands_twice_in_its_store": "KeyError: 12 at",
    "a_chunk_begins_with_an_image_and_ends_in_it":
        "it computes it up to 1, where r2 computes its image at 0 whole",
    "an_eviction_gives_up_beside_idle_copies": "chunk 3, which no eviction takes",
    "an_eviction_gives_up_beside_a_copy_that_went_to_a_storage": "chunk 0, which no eviction takes",
    "an_eviction_gives_up_beside_copies_that_went_to_a_storage": "chunk 2, which no eviction takes",
    "a_block_of_a_state_stands_twice_in_its_store": "KeyError: 2 at",
    "a_reset_of_host_memory_fails_beside_a_waiting_hit": "returns False, and no KV moves",
    "a_reset_of_host_memory_fails_beside_a_waiting_hit_in_time": "returns False, and no KV moves",
    "new_weights_leave_host_memory_beside_a_waiting_hit": "1, where no hash in host memory",
    "new_weights_leave_host_memory_beside_a_waiting_hit_in_time": "1, where no hash in host memory",
    "lazy_stores_keep_a_block_from_a_request_that_needs_all": "r1 is WAITING with 15 tokens",
    "a_next_turn_stores_a_block_twice": "the free queue lacks block 2",
    "a_next_turn_stores_blocks_of_two_groups_twice": "the free queue lacks block 2",
    "a_block_that_left_a_window_is_stored_twice": "the free queue lacks block 5",
    "a_hit_of_a_part_of_a_block_ends_the_server": "assert num_blocks_to_load > 0",
    "a_storage_outlives_new_weights": "where r2 has weights of update 1",
    "a_storage_outlives_new_weights_in_flight": "where r2 has weights of update 1",
    "a_repeated_image_is_given_up_in_the_middle":
        "image A3 is kept for nobody, where r1 must keep image A3",
    "an_image_is_kept_for_a_request_that_a_drafter_holds_back":
        "it is kept for r1, which is WAITING and holds none",
    "a_reset_forgets_an_image_that_a_turn_came_without": "RuntimeError: Encoder cache miss for A2.",
    "a_turn_that_waits_makes_a_chunk_preempt_itself": "after 2 forward passes in 4 calls of the",
    "a_drafter_looks_into_an_image_behind_another":
        "it computes it up to 4, where r2 computes its image at 2 whole",
    "a_drafter_looks_into_an_image_behind_a_token": "no batch comes, with 4 blocks free and r1 WAITING",
    "an_image_that_has_no_room_stops_a_drafters_chunk": "no batch comes, with 5 blocks free and r1 WAITING",
    "an_image_is_longer_than_a_chunk": "no batch comes, with 3 blocks free and r1 WAITING, r2 WAITING",
    "the_image_of_a_turn_leaves_no_room_for_the_next": "no batch comes, with 13 blocks free and r4 WAITING",
    "an_image_is_chosen_and_its_request_preempted":
        "the worker does not have it, where the worker keeps image C1",
    "new_weights_forget_an_image_that_the_cache_had_in_time": "RuntimeError: Encoder cache miss for A4.",
    "a_null_block_of_a_next_turn_stands_behind_the_first_turns_block":
        "AssertionError: assert start_gpu_block_idx",
    "new_weights_forget_an_image_that_the_cache_had": "RuntimeError: Encoder cache miss for A1.",
    "a_preempted_request_lacks_its_cached_image_in_time": "RuntimeError: Encoder cache miss for A4.",
    "a_session_between_turns_makes_a_chunk_preempt_itself_in_time":
        "after 2 forward passes in 4 calls of the",
    "a_drafter_reads_the_next_image_beside_another_request": "AssertionError: Encoder cache miss for B1.",
    "a_drafter_reads_an_image_that_is_not_encoded": "AssertionError: Encoder cache miss for A2.",
    "a_session_between_turns_makes_a_chunk_preempt_itself": "after 2 forward passes in 4 calls of the",
    "a_cached_image_is_sent_without_its_pixels": "RuntimeError: Encoder cache miss for A1.",
    "a_preempted_request_lacks_its_cached_image": "RuntimeError: Encoder cache miss for A2.",
    "new_weights_forget_an_image_that_a_turn_came_without": "RuntimeError: Encoder cache miss for A1.",
    "a_hit_within_a_block_leaves_no_room_for_its_prompt":
        "no batch comes, with 13 blocks free and r2 WAITING",
    "a_hit_within_a_block_leaves_no_room_in_time": "no batch comes, with 13 blocks free and r1 WAITING",
    "a_request_behind_one_that_preempts_itself_goes_on_in_the_first_column":
        "where r2 continues from the state after its first",
    "an_adapter_loaded_again_finds_its_old_kv":
        "a key of r2 finds block 1, which holds KV of adapter a, where r2 has adapter a (load 2)",
    "a_salt_of_an_adapters_name_finds_its_kv":
        "a key of r2 finds block 1, which holds KV of salt a, where r2 has adapter a",
    "an_adapter_loaded_again_finds_its_old_kv_in_time":
        "a key of r1 finds block 1, which holds KV of adapter a, where r1 has adapter a (load 2)",
    "a_salt_of_an_adapters_name_finds_its_kv_in_time":
        "a key of r1 finds block 1, which holds KV of salt a, where r1 has adapter a",
    "new_weights_find_old_copies_in_host_memory": "1, where no hash in host memory",
    "new_weights_find_old_copies_in_host_memory_in_time": "1, where no hash in host memory",
    "a_state_is_stored_from_the_block_of_the_next_request_at_once":
        "it was written, where block 8 stays as it is until transfer 0 has read it",
    "a_state_is_stored_from_the_block_of_a_request_that_runs_on":
        "chunk 0 holds the state after other tokens",
    "a_state_is_stored_from_a_block_that_holds_kv": "chunk 0 holds no state of this group",
    "a_copy_is_made_in_a_block_that_is_being_stored":
        "it was written, where block 3 stays as it is until transfer 1 has read it",
    "a_copy_is_made_in_a_block_that_is_being_stored_at_once":
        "it was written, where block 5 stays as it is until transfer 1 has read it",
    "a_state_is_copied_into_the_block_of_a_request_that_has_ended":
        "it was written, where block 2 stays as it is until transfer 0 has read it",
    "a_next_turn_is_padded_beside_another_and_cut_at_a_block_of_state": "no token of",
    "loads_that_need_a_block_more_hold_all_of_them": "no batch comes, with 1 blocks free",
    "a_load_holds_the_block_that_a_preempted_request_needs": "no batch comes, with 0 blocks free",
    "a_padded_round_of_a_next_turn_is_cut_at_a_block_of_state": "no token of",
    "a_padded_round_that_is_cut_reads_a_state_before_the_first":
        "illegal memory access in postprocess_mamba_fused_kernel: index -1 is before the first",
    "a_state_is_stored_from_the_block_of_the_next_request":
        "it was written, where block 3 stays as it is until transfer 4 has read it",
    "a_running_request_preempts_itself_for_ever_beside_a_waiting_turn":
        "after 2 forward passes in 4 calls of the",
    "two_requests_preempt_each_other_for_ever": "after 2 forward passes in 4 calls of the",
    "a_prompt_of_one_token_is_loaded_again_and_again": "4 calls of the scheduler later nothing has run",
    "a_prompt_of_one_token_is_loaded_for_ever": "4 calls of the scheduler later nothing has run",
    "a_turn_that_ends_twice_leaves_its_session_without_a_schedule": "2 calls of the scheduler later",
    "a_turn_that_ends_twice_leaves_another_request_without_a_schedule": "2 calls of the scheduler later",
    "a_turn_that_ends_twice_leaves_a_running_request_without_a_schedule": "2 calls of the scheduler later",
    "a_preempted_request_runs_behind_a_block_that_was_freed": "block 1 holds nothing of this group there",
    "a_loaded_request_waits_behind_a_preempted_one": "no batch comes, with 3 blocks free",
    "a_loaded_request_waits_behind_a_load_that_its_rest_leaves_no_room": "no batch comes, with 5 blocks free",
    "a_load_begins_beside_the_store_of_a_next_turn": "AssertionError: assert not req_status.transfer_jobs",
    "a_preempted_request_waits_for_a_store_that_a_reset_forgot": "no batch comes, with 3 blocks free",
    "a_turn_that_ends_twice_empties_the_queue_of_batches": "it computes from 4",
    "a_name_that_is_used_again_gets_an_old_result": "(update drafts 0): it gets [877628], where r1 gets []",
    "an_old_result_for_a_prompt_in_chunks_ends_the_engine":
        "AssertionError: assert request.num_output_placeholders >= 0",
    "a_null_block_bears_a_hash": "it has one in group 0, where block 0, the null block, has no hash",
    "a_null_block_bears_a_hash_after_a_round_of_drafts":
        "it has one in group 0, where block 0, the null block, has no hash",
    "a_null_block_that_is_published_twice_ends_the_server": "AssertionError: assert blk.block_hash is None",
    "a_preempted_request_resumes_without_its_token_in_flight":
        "other tokens, or none, where r2 computes its text at [4, 6)",
    "a_reset_drops_a_token_behind_a_round_of_drafts": "it gets [], where r1 gets [686538]",
    "a_reset_drops_the_next_token_of_a_request": "(update drafts 0): it gets [], where r1 gets [980670]",
    "a_reset_has_rejected_drafts_taken_back_from_a_new_start":
        "1, where r1: the scheduler counts at least 2; r1 is RUNNING with 2 tokens",
    "a_turn_that_ends_with_a_step_in_flight_gives_up_its_window":
        "is the null block, where r1, whose confirmed length is 5, must",
    "a_turn_that_ends_with_a_step_in_flight_goes_on_too_far": "it computes from 2, where r1 goes on at 1",
    "a_window_is_freed_by_the_optimistic_count":
        "r1 at [2, 3) of group 0 has the null block since command 4; until then it had block 3",
    "a_session_grows_past_max_model_len": "it computes [4, 7), where r1 ends by 6; r1 is RUNNING with 7",
    "a_session_keeps_the_hash_of_a_dropped_token":
        "is named by the prefix cache since command 4, and r1 has it at [2, 4) of group 0 since command 1",
    "an_idle_session_asks_for_more_blocks_than_are_free":
        "command 14 (schedule) makes the system fail, ValueError: Cannot get 4 free blocks",
    "two_waiting_turns_hold_each_others_blocks": "no batch comes, with 4 blocks free and",
    "a_decode_preempted_in_its_own_step_leaves_a_published_block": "nobody has written block 10",
    "a_turn_waits_behind_a_turn_that_holds_its_blocks": "no batch comes, with 2 blocks free and",
    "a_resumed_request_counts_what_its_lost_round_accepted":
        "r2 left the state after its token 6 in block 8 last, in command 5 (schedule accept 1)",
    "a_turn_longer_than_the_model_has_no_room_in_its_row_of_states": "exceeds row capacity (5 > 4) at vllm/",
    "a_turn_longer_than_the_model_has_no_room_in_its_row_of_states_in_time": "exceeds row capacity (5 > 4)",
    "a_turn_longer_than_the_model_fails_an_assertion": "AssertionError: assert block_mask is None or len",
    "a_turn_longer_than_the_model_waits_for_ever": "no batch comes, with 2 blocks free and",
    "a_padded_round_is_cut_by_the_prefill_threshold":
        "1 sampled token, where no token of r2 is due: its text of 1 token is computed up to 0",
    "a_request_preempted_in_its_own_step_leaves_a_published_block":
        "is free from the start and is named by the prefix cache since command 6; nobody has written block 7",
    "a_next_turn_keeps_a_token_of_an_accepted_round": "4 tokens, another one at position 2, where r1: the 3",
    "a_next_turn_keeps_the_first_turns_max_tokens": "it ends: length, where r1 goes on",
    "a_request_preempted_in_its_own_step_runs_all_the_same":
        "r1 at [0, 1) of group 0 has no block since command 6",
    "an_unwritten_slot_is_stored_with_its_block": "store 0 has moved block 1 into it by command",
    "an_abort_before_the_first_batch_ends_the_server": "assert len(offload_keys) == len(offload_block_ids)",
    "a_preempted_request_is_loaded_in_the_next_step": "assert self._jobs[any_jid].is_store",
    "a_second_reset_of_host_memory_ends_the_server": "assert not self._current_batch_jobs_to_flush",
    "a_chunk_with_a_hole_is_stored_too_far_to_the_left": "store 0 has moved block 1 and 3 into it by",
    "a_chunk_loses_a_block_to_whoever_is_admitted_in_time": "store 0 has moved block 1 and 3 into it by",
    "a_reset_stores_blocks_that_the_window_gave_back": "is named by a hash since command",
    "a_load_waits_for_more_blocks_than_there_are": "r1 is WAITING with 2 tokens",
    "a_turn_longer_than_the_model_fails_an_assertion_in_flight": "AssertionError",
    "a_round_preempted_in_its_own_step_leaves_a_published_block": "holds KV of another token, where it must",
    "a_null_block_bears_a_hash_behind_accepted_drafts": "where block 0, the null block, has no hash",
    "a_preempted_request_samples_behind_a_token_short": "no token of",
    "a_running_request_is_counted_as_at_admission": "Cannot get 1 free blocks",
    "a_load_is_given_a_block_that_was_just_found": "r3 has it at [2, 4) of group 0",
    "a_loaded_request_takes_the_row_of_a_waiting_turn": "AssertionError: No free indices at",
    "a_load_is_given_a_block_that_a_step_still_writes": "one does, where no step in flight uses block 2",
    "a_load_is_given_a_block_that_a_step_behind_a_stop_still_writes": "one does, where no step in flight",
    "a_turn_longer_than_the_model_is_written_past_its_row_in_time": "memory access in _apply_write_kernel",
    "a_short_turn_waits_behind_one_that_has_no_room": "no batch comes, with 3 blocks free and",
    "a_block_stands_twice_in_its_store_after_a_reset": "makes the system fail, KeyError: 1 at",
    "a_block_stands_twice_in_a_chunk_that_is_stored_late_in_time": "makes the system fail, KeyError: 12 at",
    "a_block_stands_twice_in_its_store_after_a_reset_in_time": "makes the system fail, KeyError: 10 at",
    "a_reset_of_host_memory_during_a_store_ends_the_server": "makes the system fail, KeyError: 0 at",
    "a_reset_stores_blocks_that_the_window_gave_back_in_time": "is named by a hash since command",
    "a_reset_stores_a_freed_window_block_while_it_is_written": "stays as it is until transfer 3",
    "a_reset_stores_a_state_that_was_given_back": "block 2 stays as it is until transfer 1 has read it",
    "a_reset_stores_a_state_that_its_own_request_writes_again": "block 8 stays as it is until transfer 4",
    "a_session_grows_past_max_model_len_in_its_own_step": "it computes [2, 5), where r1 ends by 4",
    "a_session_at_max_model_len_waits_for_ever": "no batch comes, with",
    "a_session_grows_past_max_model_len_on_the_device": "it computes [4, 6), where r2 ends by 5",
    "a_turn_longer_than_the_model_is_written_past_its_row": "illegal memory access in _apply_write_kernel",
    "window_blocks_are_stored_after_others_have_them": "store 0 has moved block 1 and 2 and 3 into it by",
    "a_next_turn_is_stored_from_the_first_turns_block": "store 1 has moved block 1 into it by command",
    "a_load_is_given_a_block_that_its_window_found_in_time": "r5 has it at [3, 6) of group 0",
    "a_reset_of_host_memory_keeps_the_record_of_a_finished_request_in_time": "no record of what is gone",
    "an_unwritten_slot_is_stored_with_its_block_in_time": "store 0 has moved block 1 into it by",
    "a_session_keeps_the_hash_of_a_dropped_token_in_time": "is named by the prefix cache since command 5",
    "two_waiting_turns_hold_each_others_blocks_in_time": "no batch comes, with 0 blocks free and",
    "a_round_is_written_into_a_block_that_the_window_freed": "position 2 of group 0 into a block of its own",
    "a_window_block_is_written_again_before_its_store": "block 2 stays as it is until transfer 0",
    "a_window_block_is_written_again_before_its_store_in_time": "block 2 stays as it is until transfer 0",
    "a_loaded_request_takes_the_row_of_a_waiting_turn_in_time": "AssertionError: No free indices at",
    "a_turn_that_waits_with_an_image_loses_its_row": "AssertionError: No free indices at",
    "a_turn_that_waits_with_an_image_loses_its_row_in_time": "AssertionError: No free indices at",
    "a_request_preempted_in_its_own_step_runs_all_the_same_in_time": "r1 at [0, 2) of group 0",
    "a_chunk_preempted_in_its_own_step_runs_all_the_same": "nobody has written block 7",
    "a_turn_that_ends_twice_stands_twice_in_the_queue": "RuntimeError: Invalid request status: RUNNING",
    "a_loaded_request_waits_behind_a_loaded_one": "no batch comes, with 0 blocks free and r1 WAITING",
    "a_loaded_request_waits_behind_one_that_has_no_room": "no batch comes, with 5 blocks free and",
    "a_loaded_request_waits_behind_one_of_higher_priority": "no batch comes, with 1 blocks free and",
    "a_loaded_request_waits_behind_one_of_higher_priority_in_time": "no batch comes, with 1 blocks free",
    "a_loaded_request_waits_behind_a_cached_one_of_higher_priority":
        "no batch comes, with 4 blocks free",
    "a_window_block_of_one_chunk_is_written_again_before_its_store": "block 2 stays as it is until",
    "a_turn_that_ends_twice_counts_after_its_session": "no batch comes, with 6 blocks free and r2 WAITING",
    "a_store_counts_a_block_that_the_window_left_out": "assert sum(group_sizes) == len(block_ids)",
    "a_next_turn_keeps_the_first_turns_max_tokens_in_time": "it ends: length, where r1 goes on",
    "a_token_of_a_step_in_flight_becomes_text_of_the_next_turn": "3 tokens, another one at position 1",
    "a_turn_that_ends_inside_a_round_gets_a_token_of_the_step_in_flight": "was sampled behind another",
    "a_next_turn_is_stored_from_the_first_turns_block_in_time": "store 1 has moved block 1 into it by",
    "a_session_that_ends_has_one_block_twice_in_a_store": "KeyError: 1",
    "a_session_that_ends_has_one_block_twice_in_a_store_in_time": "KeyError: 1",
    "a_last_token_opens_a_block_that_was_never_allocated": "assert len(offload_keys) == len",
    "a_reset_of_host_memory_keeps_the_record_of_a_finished_request": "no record of what is gone",
    "a_request_preempted_in_its_own_step_leaves_a_published_state": "recurrent state is that after token 1",
    "a_hit_within_a_block_bears_the_hash_of_the_whole_block": "a state was copied into block 7 last",
    "a_next_turn_goes_on_in_the_first_column_of_a_round": "r1 left the state after its token 2 in block 1",
    "a_next_turn_goes_on_in_the_first_column_of_a_round_in_time": "left the state after its token 4",
    "a_next_turn_goes_on_in_the_first_column_on_the_device": "its recurrent state is that after token 2",
    "a_turn_that_stops_with_a_step_in_flight_leaves_a_state_that_is_too_far": "after its token 2 in",
    "a_turn_that_stops_with_a_step_in_flight_leaves_a_state_on_the_device": "after its token 2 in",
    "a_hit_within_a_block_bears_the_hash_of_the_whole_block_in_time": "a state was copied into block 9 last",
    "a_hit_within_a_block_bears_the_hash_of_the_whole_block_on_the_device": "copied into block 7 last",
    "a_hit_within_a_block_bears_the_hash_of_the_whole_block_on_the_device_in_time": "into block 9 last",
    "a_preempted_session_copies_from_past_its_table": "IndexError: list index out of range at",
    "a_turn_that_ends_within_a_round_leaves_a_state_that_is_too_far": "is that after other tokens, or more",
    "a_request_that_a_batch_leaves_out_goes_on_in_the_first_column": "state is that after token 3",
    "a_preempted_session_finds_its_old_column": "after other tokens, or more, where r2",
    "a_prompt_ends_with_drafts_of_the_turn_before": "where r1 keeps the state after its first 6 tokens",
    "a_session_publishes_a_state_under_the_hash_of_a_dropped_token":
        "named by the prefix cache since command 4",
    "a_session_publishes_a_state_under_the_hash_of_a_dropped_token_in_time":
        "named by the prefix cache since command 5",
    "a_step_behind_a_prompt_names_the_state_that_it_overwrites": "after its token 3 in block 2 last",
    "a_turn_preempted_with_its_last_token_in_flight_loses_its_text": "another one at position 0, where r2",
    "a_prompt_of_one_token_is_padded_and_runs_as_a_prompt": "r2 keeps the state after its first 1 tokens",
    "a_padded_round_is_cut_at_a_block_of_state":
        "1 sampled token, where no token of r2 is due: its text of 3 tokens",
    "a_round_that_is_padded_beside_another_is_cut_at_a_block_of_state":
        "1 sampled token, where no token of r2 is due: its text of 3 tokens",
    "a_step_behind_a_prompt_names_the_running_state": "after its token 3 in block 2 last",
    "a_last_token_opens_a_block_that_was_never_allocated_in_time": "assert len(offload_keys) == len",
    "a_preempted_request_is_loaded_from_host_memory_in_time": "assert self._jobs[any_jid].is_store",
    "a_load_is_given_the_window_block_of_a_step_behind_a_stop":
        "r1 wrote [1, 2) of group 0 of block 1 last",
    "a_load_is_given_the_block_of_a_step_behind_a_stop": "one does, where no step in flight uses block 2",
    "a_loaded_request_is_preempted_and_loaded_again_in_time": "assert self._jobs[any_jid].is_store",
    "a_load_after_a_reset_is_given_a_block_that_a_step_still_writes": "one does, where no step in flight",
    "a_store_counts_a_block_that_the_window_left_out_in_time": "assert sum(group_sizes) == len(block_ids)",
    "a_reset_gives_away_a_block_that_is_stored_behind_a_second_reset":
        "it was written, where block 1 stays as it is until transfer 2 has read it",
    "a_reset_gives_away_a_block_that_is_stored_in_time": "where block 6 stays as it is until transfer 1",
    "a_prompt_waits_for_blocks_that_its_window_would_leave_out": "no batch comes, with 3 blocks free and r1",
    "a_null_block_that_is_published_twice_ends_the_server_in_time": "assert blk.block_hash is None",
    "a_reset_gives_away_a_block_that_is_stored_behind_a_chunk": "where block 4 stays as it is until",
    "a_reset_gives_away_a_block_that_is_stored": "where block 3 stays as it is until transfer 2 has read it",
    "a_load_is_given_a_block_that_its_window_found": "r3 has it at [3, 6) of group 0",
    "a_load_from_the_host_is_given_a_block_that_its_window_found": "block 3 has 2 owners",
    "a_load_is_given_a_window_block_that_a_step_still_writes": "one does, where no step in flight",
    "a_drafter_sees_the_last_token_behind_a_chunk": "block 2 holds KV of another text or next token there",
    "a_drafter_sees_the_last_token_behind_a_chunk_in_time": "the drafter of r1 finds its KV at position 1",
    "a_drafter_skips_a_batch_with_a_text_near_the_limit": "holds none of it there, where the drafter of r2",
    "a_drafter_skips_a_batch_with_a_text_near_the_limit_in_time": "drafter of r2 finds its KV at position 0",
    "a_block_that_a_hit_has_left_out_is_found_again": "the drafter of r3 finds its KV at position 1",
    "a_block_that_a_hit_has_left_out_is_found_again_in_time": "the drafter of r3 finds its KV at position 1",
    "a_block_that_a_hit_has_left_out_is_found_again_beside_a_connector": "block 1 holds KV of another text",
    "a_first_step_has_no_slots_ahead": "entry 1 of its table is past its end, where the drafter of r1",
    "an_eviction_gives_up_beside_idle_copies_of_a_window": "chunk 2, which no eviction takes",
    "a_preempted_request_finds_the_block_of_another_next_token": "the drafter of r2 finds its KV at",
    "a_block_that_a_hit_has_left_out_is_found_again_beside_a_connector_in_time":
        "block 1 holds KV of another text or next token",
    "a_preempted_request_finds_the_block_of_another_next_token_in_flight":
        "block 1 holds KV of another text or next token",
}  # fmt: skip


# a block is marked
DRAWN = {
    "BLK-2", "BLK-3", "DRAFT-1", "HOST-2", "KEY-1", "PUB-1", "XFER-1", "XFER-2", "STA-1", "STA-2", "STA-3",
    "a_sharer_runs_ahead_of_the_recompute",
}  # fmt: skip


def released(path):
    return path.parent.name.removeprefix("vllm-")


# A fault's first trace by day, its others at night.
FIRST = {fault.id: path for path, fault in reversed(TRACES)}.values()


@pytest.mark.parametrize(
    "path",
    some_at_night((path for path, _ in TRACES), lambda path: path not in FIRST),
    ids=lambda path: path.stem,
)
def test_the_reason_is_a_true_sentence_and_is_drawn(vllm, path):
    run = replay(vllm(released(path)), traces.load(path))
    explained = because(run)
    assert SAID[path.stem] in explained.text
    for claim in explained.claims:
        held = [claim.holds(moment) for moment in run.history]
        since = claim.since - run.history_start
        assert all(held[since:]) and not any(held[since - 1 : since]), claim.what
    data = report.replay_data(str(path), run) | {"replay": "kvspec replay"}
    shown = Reader(trace_page.page(data, run))
    assert f"step-{len(run.rows) - 1}" in shown.ids and explained.text[1:] in shown.text
    wrong = [
        value for _, name, value in shown.attributes if name == "class" and "wrong" in value.split()
    ]
    drawn = run.violation.clause in DRAWN or path.stem in DRAWN
    assert bool(wrong) == drawn


EXPORTED = "0.26.0+offload", "0.12.0", "0.22.0+offload", "0.15.0+async"


@pytest.mark.parametrize("release", some_at_night(EXPORTED, EXPORTED[1:].__contains__))
def test_unit_tests_fail_where_the_fault_is_and_pass_where_it_is_fixed(vllm, release, tmp_path):
    """On the release's own scheduler; nothing of kvspec is imported."""
    system, runs, wanted = vllm(release), [], []
    for path, fault in (each for each in TRACES if released(each[0]) == release):
        fixed = engine_test.target(fault.fixed) if fault.fixed else None
        if path.stem in SHOWN_BY_NO_OBJECT:
            with pytest.raises(NotExportable, match=f"{NO_OBJECT}|new weights|pool of blocks"):
                engine_test.unit_test(traces.load(path), path.name, system, fixed)
            continue
        text = engine_test.unit_test(trace := traces.load(path), path.name, system, fixed)
        assert not re.search(r"^ *(from|import) (kvspec|impl|reference|ci)\b", text, re.MULTILINE)
        (file := tmp_path / f"{path.stem}.py").write_text(text)
        wanted += [(path.stem, FAILS), (path.stem, 0)][: 1 + (fixed is not None)]
        runs += [(target.root, "", [file]) for target in (system, fixed) if target is not None]
    ends = outcomes(*runs, hook=engine_test.hook(trace))
    assert [(name, code) for (name, _), (code, _) in zip(wanted, ends, strict=True)] == wanted, ends


STATES = {
    "a_step_behind_a_prompt_names_the_running_state": "STA-3",
    "a_step_behind_a_prompt_names_the_state_that_it_overwrites": "STA-3",
    "a_session_publishes_a_state_under_the_hash_of_a_dropped_token": "STA-3",
    "a_turn_that_stops_with_a_step_in_flight_leaves_a_state_that_is_too_far": "STA-2",
    "a_request_preempted_in_its_own_step_leaves_a_published_state": "STA-3",
}


@pytest.mark.parametrize("name", STATES)
def test_a_fault_of_recurrent_state_makes_a_test_of_the_scheduler(vllm, name, tmp_path):
    """A state is the tokens that were folded into it, in the block where a worker would have it."""
    [(path, fault)] = [each for each in TRACES if each[0].stem == name]
    system = vllm(released(path))
    text = engine_test.unit_test(trace := traces.load(path), path.name, system)
    assert f'"{STATES[name]}: expected ' in text
    (file := tmp_path / "test_it.py").write_text(text)
    runs = [(system.root, "", [file])]
    if fault.fixed:
        runs.append((engine_test.target(fault.fixed).root, "", [file]))
    codes = [code for code, _ in outcomes(*runs, hook=engine_test.hook(trace))]
    assert codes == [FAILS, 0][: len(runs)]


PUBLISHED = "a_request_preempted_in_its_own_step_leaves_a_published_block"


def test_the_command_line_shows_a_finding(vllm, kvspec, tmp_path):
    vllm("0.33.0")
    [path] = [path for path, _ in TRACES if path.stem == PUBLISHED]
    code, out, _ = kvspec("replay", str(path), "--impl", "vllm==0.33.0", "--html", "page.html")
    assert (
        code == 1
        and "what it did" in out
        and "because" in out
        and (tmp_path / "page.html").exists()
    )
    assert "calls" in out and "vllm/v1/core/sched/scheduler.py: " in out
    code, out, _ = kvspec("replay", str(path), "--impl", "vllm==0.33.0", "--json", "-")
    called = json.loads(out)["replays"][0]["called"]
    [functions] = (line for line in called if line.startswith("vllm/v1/core/sched/scheduler.py"))
    assert "Scheduler.schedule" in functions
    code, out, _ = kvspec("export", str(path), "--as", "story", "--impl", "vllm==0.33.0")
    assert (
        code == 0
        and "slot 0 of block 8 is" in " ".join(out.split())
        and "kv_committed_len" not in out
    )
    named = ("--name", "a_name_of_four_words", "--story", "A story of what happens.", "--out", ".")
    code, out, _ = kvspec("new-fixture", str(path), "--impl", "vllm==0.33.0", *named)
    made = traces.load(tmp_path / "a_name_of_four_words.json")
    assert code == 0 and len(made.expected) == len(made.commands)
    code, _, err = kvspec("new-fixture", str(path), *named, "--force")
    assert code == 2 and "no system that violates it" in err


# Faults of vLLM 0.33.0: each is seen, every clause is the first to see one, and each makes a unit test.
FAULTS = planted_faults("vllm/faults.toml")

# they compare host memory with what is in flight
UNSEEN = {"HOST-1", "HOST-3", "XFER-1", "XFER-2", "XFER-3"}
NO_OBJECT = "no object of the scheduler shows it"
NO_DRAFTER = "# a drafter has KV of its own, and the test of a scheduler has no drafter"
# Rounds of drafts, checkpoints within a chunk, and the states that a request keeps.
OF_THE_WORKER = "recurrent state is the worker's, and the test has a scheduler alone"
KEPT_BY_THE_WORKER = {
    "count-of-another-request",
    "window-does-not-move-with-its-state",
    "boundary-state-is-not-saved",
    "checkpoint-one-hash-early",
    "running-state-counts-as-skipped",
    "boundary-state-goes-over-the-running-one",
    "chunk-of-a-prompt-keeps-drafts",
}
SHOWN_BY_NO_OBJECT = {
    "an_eviction_gives_up_beside_idle_copies",
    "new_weights_find_old_copies_in_host_memory",
    "new_weights_find_old_copies_in_host_memory_in_time",
    "a_next_turn_stores_blocks_of_two_groups_twice",
    "two_requests_preempt_each_other_for_ever",
    "a_running_request_preempts_itself_for_ever_beside_a_waiting_turn",
    "a_turn_that_ends_twice_leaves_its_session_without_a_schedule",
    "a_turn_that_ends_twice_leaves_another_request_without_a_schedule",
    "a_turn_that_ends_twice_leaves_a_running_request_without_a_schedule",
    "a_turn_that_ends_inside_a_round_gets_a_token_of_the_step_in_flight",
    "a_reset_of_host_memory_keeps_the_record_of_a_finished_request",
    "a_reset_of_host_memory_keeps_the_record_of_a_finished_request_in_time",
}


# By day each branch of each clause has its rows (test_clause_rows.py).
@at_night
def test_a_fault_is_seen_first_by_its_clause_and_makes_a_unit_test_and_the_release_conforms(vllm):
    vllm("0.33.0")  # or it is unavailable
    seen = {}
    for suite in ("vllm", "vllm+images"):
        text = printed_by("stateful_tests.tests.support.fault_runs", suite, "--replay")
        seen |= json.loads(text)
    first = {name: each["with"][:1] for name, each in seen.items()}
    assert first == {name: [fault.clause] for name, fault in FAULTS.items()}
    assert [name for name, each in seen.items() if each["without"]] == []
    tested = {name: each["exported"] for name, each in seen.items()}
    # What goes wrong in the worker alone, no object of the scheduler shows.
    worker = [name for name, fault in FAULTS.items() if "/worker/" in fault.file]
    not_shown = dict.fromkeys(worker, ["passes"] * 2)
    for name, fault in FAULTS.items():
        if {*seen[name]["with"]} <= UNSEEN or name == "session-text-lost-in-the-worker":
            not_shown[name] = [f"# {fault.clause}: {NO_OBJECT}"] * 2
    for name in KEPT_BY_THE_WORKER:
        not_shown[name] = [f"# {FAULTS[name].clause}: {OF_THE_WORKER}"] * 2
    for name in ("new-weights-beside-running-requests", "new-weights-leave-host-memory"):
        not_shown[name] = [
            "# new weights: the test of a scheduler has no server that loads them"
        ] * 2
    for name in (
        "a-preemption-drops-what-was-computed-and-begins-anew",
        "a-preempted-request-is-not-queued",
    ):
        not_shown[name] = [f"# {FAULTS[name].clause}: {NO_OBJECT}"] * 2
    for name, fault in FAULTS.items():
        sizes = config_of(BLOCKS, fault.sizes)
        if sizes.draft_group is not None:
            not_shown[name] = [NO_DRAFTER] * 2
        if sizes.storage or sizes.simple:
            of_pool = "host memory is a pool of blocks"
            what = "a storage stands behind host memory" if sizes.storage else of_pool
            not_shown[name] = [f"# {what}, and the test of a scheduler has none"] * 2
    for name in (name for name, fault in FAULTS.items() if "images" in fault.spec.ways):
        not_shown[name] = [
            "# prompts have images, and the test of a scheduler has no encoder"
        ] * 2
    assert tested == {name: not_shown.get(name, ["fails", "passes"]) for name in FAULTS}


def test_every_clause_is_the_first_to_see_a_fault():
    # whom the front end of vLLM refuses is played; LMDeploy's own bound is driven
    assert {*BLOCK_CLAUSES} - {"PRO-3"} <= {fault.clause for fault in FAULTS.values()}
    of_lmdeploy = planted_faults("lmdeploy/faults.toml").values()
    assert any("PRO-3" in fault.caught_by for fault in of_lmdeploy)
