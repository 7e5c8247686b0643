"""Text as it comes: whole characters, no beginning of a stop string, and together what decoding at once gives."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from piecework.engine.text import TextStream


def byte_tokenizer() -> Tokenizer:
    """A tokenizer whose tokens are bytes, so that most characters take several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={word: n for n, word in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


TOKENIZER = byte_tokenizer()


def stream(text: str, stop: tuple[str, ...] = ()) -> tuple[list[str], str | None]:
    parts, made = [], TextStream(TOKENIZER, stop)
    for token in TOKENIZER.encode(text).ids:
        part, found = made.add(token)
        parts.append(part)
        if found is not None:
            return parts, found
    return [*parts, made.end()], None


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet="aé漢🙂 b", max_size=20))
def test_parts_together_are_the_whole(text: str) -> None:
    parts, _ = stream(text)
    assert "".join(parts) == text
    assert all("�" not in part for part in parts)


@settings(max_examples=250, deadline=None)
@given(st.text(alphabet="abé", max_size=24), st.lists(st.text(alphabet="abé", min_size=1, max_size=4), max_size=3))
def test_text_ends_before_the_first_stop_string_and_nothing_after_goes_out(text: str, stop: list[str]) -> None:
    parts, found = stream(text, tuple(stop))
    ends = [end for end in range(1, len(text) + 1) if any(text[:end].endswith(each) for each in stop)]
    if not ends:
        assert ("".join(parts), found) == (text, None)
        return
    matching = [each for each in stop if text[: ends[0]].endswith(each)]
    assert found in matching
    assert "".join(parts) == text[: ends[0] - max(map(len, matching))]


def test_an_incomplete_character_comes_out_when_nothing_follows() -> None:
    made = TextStream(TOKENIZER)
    first, _ = made.add(TOKENIZER.encode("é").ids[0])
    assert first == "" and made.end() == "�"


def test_a_stop_string_that_may_not_stop_yet_is_text() -> None:
    made = TextStream(TOKENIZER, ("b",))
    ids = TOKENIZER.encode("abab").ids
    parts = [made.add(token, may_stop=at > 1)[0] for at, token in enumerate(ids)]
    assert "".join(parts) == "aba"


def test_without_a_tokenizer_there_is_no_text() -> None:
    made = TextStream(None)
    assert made.add(3) == ("", None) and made.end() == ""
