"""Tokens of chats, and of prompts with completions, in which only what the assistant or the completion says is trained.

A chat template is a Jinja program of the tokenizer's folder, which transformers runs in its sandbox. Special tokens in
the contents of messages count as such, as in transformers.
"""

import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np

from quantshard import foreign
from quantshard.errors import ConfigurationError
from quantshard.tools.trainer.data.packing import FLAGGED, STARTS, UNTRAINED
from quantshard.tools.trainer.data.sources import Chat
from quantshard.tools.trainer.data.tokenizer import Tokenizer, transformers_tokenizer

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatTokenizer:
    """Turns chats into flagged tokens (`packing.MASKED`). `path`: folder of a tokenizer with a chat template."""

    def __init__(self, tokenizer: Tokenizer, path: str) -> None:
        self.tokenizer, self.path = tokenizer, path

    def encode(self, chat: Chat) -> np.ndarray:
        """Return the flagged tokens of a row, uint32."""
        ids, trained = (self._completion if "completion" in chat.row else self._messages)(chat)
        if not any(trained[1:]):
            raise ConfigurationError(f"{chat.where} has no tokens of an assistant to train on; remove the row")
        flags = np.where(trained, FLAGGED, FLAGGED | UNTRAINED).astype(np.uint32)
        # nothing precedes the first token
        flags[0] |= STARTS | UNTRAINED
        return np.asarray(ids, np.uint32) | flags

    def _completion(self, chat: Chat) -> tuple[list[int], list[bool]]:
        texts = [chat.row["prompt"], chat.row["completion"]]
        if not all(isinstance(text, str) for text in texts):
            raise ConfigurationError(f"{chat.where}: prompt and completion must be texts; use messages for chats")
        prompt, completion = self.tokenizer.encode(texts)
        ids = [*prompt, *completion, self.tokenizer.end_of_document]
        return ids, [False] * len(prompt) + [True] * (len(completion) + 1)

    def _messages(self, chat: Chat) -> tuple[list[int], list[bool]]:
        messages = chat.row["messages"]
        if not isinstance(messages, list) or not all(isinstance(message, Mapping) for message in messages):
            raise ConfigurationError(f"{chat.where}: messages must be a list of tables with role and content")
        turns = [number for number, message in enumerate(messages) if message.get("role") == "assistant"]
        if not turns:
            raise ConfigurationError(f"{chat.where}: the chat has no assistant turn; remove the row")
        tokenizer = self._template_tokenizer
        with foreign.errors_in_one_line(f"{chat.where}: the chat template fails"):
            if _GENERATION.search(str(tokenizer.chat_template)):
                options = {"return_dict": True, "return_assistant_tokens_mask": True}
                encoded = tokenizer.apply_chat_template(messages, **options)
                return encoded["input_ids"], [bool(flag) for flag in encoded["assistant_masks"]]
            text = tokenizer.apply_chat_template(messages, tokenize=False)
            spans = []
            for turn in turns:
                before = tokenizer.apply_chat_template(messages[:turn], tokenize=False, add_generation_prompt=True)
                upto = tokenizer.apply_chat_template(messages[: turn + 1], tokenize=False)
                if not upto.startswith(before) or not text.startswith(upto):
                    hint = "mark the assistant's text in it with {% generation %}"
                    raise ConfigurationError(f"{chat.where}: the chat template changes earlier turns; {hint}")
                spans.append(range(len(before), len(upto)))
            encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return encoded["input_ids"], [any(first in span for span in spans) for first, _ in encoded["offset_mapping"]]

    @cached_property
    def _template_tokenizer(self) -> Any:
        if not self.path:
            raise ConfigurationError("chats need --tokenizer, a folder whose tokenizer has a chat template")
        loaded = transformers_tokenizer(self.path, "a chat template")
        if not loaded.chat_template:
            raise ConfigurationError(f"--tokenizer {self.path} has no chat template; name a folder that has one")
        return loaded
