"""The documents' ConversationCache: the turns of a conversation, the tokens that each of them owns, and the blocks that these lie
in.

The key of a token depends on all tokens before it. So a turn that is dropped takes the keys of all later turns with it: they are
computed again, at their new places, and the result is exactly that of a conversation that began with them. What the document's
comment proposes, a map of token ids to blocks, cannot be right for that reason.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from .cache import Cache
from .errors import InvalidArgument, TooLong

if TYPE_CHECKING:
    from .engine import LLM, Completion

__all__ = ["ConversationCache", "Turn"]


class Turn(NamedTuple):
    """A user's input and the answer; they own the tokens start … end - 1 of the conversation."""

    user_input: str
    assistant_output: str
    start: int
    end: int


def _characters(messages):
    """Without a model: a token is a byte of the text, and a turn ends with a 0."""
    return list(b"".join(m["content"].encode() + b"\0" for m in messages))


class ConversationCache:
    """The turns of one conversation, at most max_history_len tokens of them: the oldest go first.

    llm       an LLM: tokens are those of its chat template, and its cache has the keys and values of the conversation, so that a
              reply computes what is new only. None: a token is a byte of text, and blocks are counted only
    system    the system's message, which is never dropped
    cache     Cache in which the conversation has its blocks, of your layers' shape if you compute yourself (`sequence` and its
              slots are yours to write); None: one that holds max_history_len tokens
    """

    def __init__(self, max_history_len: int = 4096, *, llm: LLM | None = None, system: str | None = None,
                 cache: Cache | None = None) -> None:
        self.max_history_len = int(max_history_len)
        if self.max_history_len < 1:
            raise InvalidArgument(f"max_history_len is {max_history_len}")
        self.llm, self.turns = llm, []
        self._head = [] if system is None else [{"role": "system", "content": system}]
        if cache is None:
            cache = Cache(1, 1, 2, layout="plain", max_blocks=-(-self.max_history_len // 16) + 1)
        self.cache = cache
        self.sequence = cache.sequence()
        self.sequence.match(())
        self._lock = threading.RLock()
        self._place(self._fitting([]))

    # ---- tokens ----

    def _tokens(self, messages, open_turn=False):
        if self.llm is None:
            return _characters(messages)
        return self.llm.chat_tokens(messages, open_turn).tolist() if messages else []

    def _messages(self, turns):
        said = [[{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}] for turn in turns]
        return [*self._head, *(message for turn in said for message in turn)]

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation as [{"role": …, "content": …}, …]."""
        return self._messages(self.turns)

    @property
    def n_tokens(self) -> int:
        """Tokens of the whole conversation."""
        return len(self.sequence)

    # ---- blocks ----

    @property
    def block_table(self) -> dict[int, list[int]]:
        """{index of a turn: the blocks that its tokens lie in}. Two turns share the block in which one ends and the other
        begins."""
        size, blocks = self.cache.block_size, self.sequence.blocks.tolist()
        return {i: blocks[turn.start // size:-(-turn.end // size)] for i, turn in enumerate(self.turns)}

    @property
    def used_blocks(self) -> set[int]:
        """The blocks of the conversation."""
        return set(self.sequence.blocks.tolist())

    # ---- turns ----

    def add_turn(self, user_input: str, assistant_output: str) -> int:
        """Adds a turn; the oldest are dropped as long as all are more than max_history_len tokens. Returns how many were.
        TooLong: this one alone is more; nothing has changed then. NoBlocks: of a cache that others use, too."""
        with self._lock:
            wanted = [*((t.user_input, t.assistant_output) for t in self.turns), (str(user_input), str(assistant_output))]
            placed = self._fitting(wanted)
            self._place(placed)
            return len(wanted) - len(placed[0])

    def clear_old_turns(self, keep_last_n: int = 5) -> int:
        """Drops all turns but the last keep_last_n. Returns the number of tokens that had to be computed again for that: those of
        the turns that stay. Blocks of the dropped ones are free for others."""
        with self._lock:
            if int(keep_last_n) < 0:
                raise InvalidArgument(f"keep_last_n is {keep_last_n}")
            kept = self.turns[max(0, len(self.turns) - int(keep_last_n)):]
            return self._place(self._fitting([(t.user_input, t.assistant_output) for t in kept]))

    def reply(self, user_input: str, **options: Any) -> Completion:
        """Has the model answer and adds the turn; returns the Completion. Options as LLM.generate()."""
        if self.llm is None:
            raise InvalidArgument("a reply needs a model; give llm")
        with self._lock:
            answer = self.llm.generate(self._tokens([*self.messages, {"role": "user", "content": str(user_input)}], True),
                                       **options)
            self.add_turn(user_input, answer.text)
            return answer

    def _fitting(self, wanted):
        """(turns with their ranges, tokens) of the last of these (user, assistant) that fit."""
        for first in range(len(wanted) + 1):
            messages = self._messages(wanted[first:])
            tokens = self._tokens(messages)
            if len(tokens) <= self.max_history_len and (first < len(wanted) or not wanted):
                break
        else:
            raise TooLong(f"{len(self._tokens(self._messages(wanted[-1:])))} tokens with the last turn alone, max_history_len is "
                          f"{self.max_history_len}")
        n_head = len(self._head)
        ends = [len(self._tokens(messages[:n_head + 2 * i])) for i in range(len(wanted) - first + 1)]
        return [Turn(*turn, *span) for turn, span in zip(wanted[first:], zip(ends, ends[1:]))], tokens

    def _place(self, placed):
        """Makes the sequence have these tokens; returns how many it did not have at their places."""
        turns, tokens = placed
        old = self.sequence.tokens.tolist()
        n_same = next((i for i, (a, b) in enumerate(zip(old, tokens)) if a != b), min(len(old), len(tokens)))
        self.sequence.truncate(n_same)
        try:
            self.sequence.reserve(len(tokens) - n_same)
        except Exception:
            # What was cut off is put back: its blocks are free at least.
            self.sequence.reserve(len(old) - n_same)
            self.sequence.commit(old[n_same:])
            raise
        self.sequence.commit(tokens[n_same:])
        if self.llm is not None and len(tokens) > n_same:
            self.llm.generate(tokens, max_tokens=1)  # keys and values of the conversation, for whoever asks next
        self.turns = turns
        return len(tokens) - n_same

    def close(self) -> None:
        """Gives the blocks back."""
        self.sequence.close()
