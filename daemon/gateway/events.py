"""How far a stream of a model's events may be given out before the journal has all of it.

Pure. Guarantee: each event goes out when it is complete, up to the first one after which an agent may act: a tool call
that is complete, the reason why the model stopped, the end. From there on the rest waits for the journal. An event that
only looks like one of these waits for nothing worse than the end of its answer.
"""

from __future__ import annotations

import re

_BOUNDARY = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_LONGEST = 4  # bytes of a boundary
# Names of fields in JSON, which no text of a model can spell: there its quotes are escaped.
_DECISIVE = re.compile(
    rb"""^data:\s*\[DONE\]                                        # OpenAI's end
    | "finish_?[rR]eason"\s*:\s*"                                 # chat completions, completions; Gemini
    | "functionCall"\s*:\s*\{                                    # Gemini: a call is whole in its event
    | "type"\s*:\s*"(?:message_delta|message_stop|error)"         # Anthropic
    | "type"\s*:\s*"response\.(?:completed|incomplete|failed)"    # responses
    """,
    re.VERBOSE | re.MULTILINE,
)
_BLOCK_BEGINS = re.compile(rb'"type"\s*:\s*"content_block_start"')
_TEXT_BLOCK = re.compile(rb'"type"\s*:\s*"(?:text|thinking|redacted_thinking)"')
_BLOCK_ENDS = re.compile(rb'"type"\s*:\s*"content_block_stop"')
_PART_ENDS = re.compile(rb'"type"\s*:\s*"response\.[a-z_.]*\.?done"')
_CALL = re.compile(rb'"type"\s*:\s*"(?:[a-z_]*_call|response\.[a-z_]*(?:arguments|tool_call_input|_call_code)\.done)"')


class EventGate:
    """Cuts a stream into what may go out and what waits."""

    def __init__(self) -> None:
        self._pending = bytearray()
        self._searched = 0  # bytes of it in which no boundary begins
        self._decided = False
        self._in_call = False  # the last block that began is not text

    def feed(self, chunk: bytes) -> bytes:
        """What may go out after this chunk; may be nothing."""
        self._pending += chunk
        if self._decided:
            return b""
        free = 0
        while (result := _BOUNDARY.search(self._pending, self._searched)) is not None:
            if self._decides(bytes(self._pending[free : result.end()])):
                self._decided = True
                break
            free = self._searched = result.end()
        out = bytes(self._pending[:free])
        del self._pending[:free]
        self._searched = max(0, len(self._pending) - _LONGEST + 1)
        return out

    def waiting(self) -> bytes:
        """What has not gone out."""
        return bytes(self._pending)

    def _decides(self, event: bytes) -> bool:
        if _DECISIVE.search(event):
            return True
        if _BLOCK_BEGINS.search(event):
            self._in_call = _TEXT_BLOCK.search(event) is None
            return False
        if self._in_call and _BLOCK_ENDS.search(event):
            return True
        return _PART_ENDS.search(event) is not None and _CALL.search(event) is not None
