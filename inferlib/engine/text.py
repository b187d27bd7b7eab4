"""Generated tokens as text: incremental decoding, stop strings, deltas for streaming."""

from __future__ import annotations

from inferlib.engine.sequence import Sequence
from inferlib.tokenizer import TextStream, Tokenizer


class OutputText:
    """The text of one sequence. `text` is final once the sequence is finished."""

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer | None):
        params = sequence.params
        if tokenizer is None and params.stop:
            raise ValueError("stop strings need a tokenizer, and this model directory has no tokenizer.json")
        self.sequence, self.text = sequence, ""
        self._stream = TextStream(tokenizer, skip_special_tokens=params.skip_special_tokens) if tokenizer else None
        self._stops, self._include_stop = params.stop or (), params.include_stop_str_in_output
        self._read, self._sent = 0, 0
        # Later text may complete a stop string, so this many characters are not sent yet.
        self._unsure = max((len(stop) for stop in self._stops), default=1) - 1

    def update(self) -> None:
        """Decode new tokens; finish the sequence at a stop string."""
        s = self.sequence
        if self._stream is None or self._read > len(s.tokens):
            return
        for position in range(self._read, len(s.tokens)):
            final = s.finish_reason is not None and position == len(s.tokens) - 1
            stopped = final and s.finish_reason == "stop" and s.tokens[position] in s.stop_ids
            if stopped and not self._include_stop:
                break  # the text of a stop token is left out
            self._append(self._stream.push([s.tokens[position]]))
            if self._stops and self._cut(position):
                return
        self._read = len(s.tokens)
        if s.finish_reason is not None:
            self._append(self._stream.finish())
            if self._stops:
                self._cut(len(s.tokens) - 1)
            self._read = len(s.tokens) + 1

    @property
    def final_characters(self) -> int:
        """The length of the text that can no longer change."""
        return len(self.text) if self.sequence.finish_reason is not None else max(len(self.text) - self._unsure, 0)

    def delta(self) -> str:
        """Text that can no longer change and was not returned before."""
        end = self.final_characters
        if end <= self._sent:
            return ""
        part, self._sent = self.text[self._sent : end], end
        return part

    def _append(self, new: str) -> None:
        self._from = max(len(self.text) - self._unsure, 0)
        self.text += new

    def _cut(self, position: int) -> bool:
        """End the sequence at the first stop string in the text, if there is one. Drops the tokens after `position`."""
        matches = [(at, stop) for stop in self._stops if (at := self.text.find(stop, self._from)) >= 0]
        if not matches:
            return False
        at, stop = min(matches)
        self.text = self.text[: at + len(stop) if self._include_stop else at]
        s = self.sequence
        del s.tokens[position + 1 :], s.logprobs[position + 1 :]
        s.finish("stop", stop)
        self._read = len(s.tokens) + 1
        return True
