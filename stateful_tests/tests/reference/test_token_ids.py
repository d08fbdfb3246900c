"""The codec of token ids and of the elements of a radix tree's keys."""

import pytest

from reference.token_ids import (
    SHARED, is_bigram, position_of, second_of, serial_of, shared_serial, shared_text, token_id, token_of,
    tokens_of, tree_key,
)  # fmt: skip
import itertools


@pytest.mark.parametrize("serial", [1, 3999, SHARED, SHARED + 25])
@pytest.mark.parametrize("position", [0, 7, (1 << 20) - 1])
def test_a_token_id_decodes_to_its_text_and_position(serial, position):
    token = token_id(serial, position)
    assert (serial_of(token), position_of(token)) == (serial, position)


def test_a_shared_text_has_the_letter_of_its_serial():
    assert [shared_text(shared_serial(text)) for text in "abz"] == [*"abz"]


def test_a_key_of_bigrams_has_each_token_with_the_next():
    tokens = [token_id(1, 0), token_id(1, 1), token_id(SHARED, 2)]
    key = tree_key(tokens, bigram=True)
    assert [(token_of(token), second_of(token)) for token in key] == [*itertools.pairwise(tokens)]
    assert all(map(is_bigram, key)) and not any(map(is_bigram, tree_key(tokens, bigram=False)))
    assert tokens_of(key) == tuple(tokens)
