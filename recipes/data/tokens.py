"""Documents as token arrays: text with an end-of-document token, chats with loss on the assistant's turns only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from transformers import ByT5Tokenizer

IGNORE = -100  # label that the loss skips, torch's and Transformers' own

_MARK = "\0"  # stands for a message's content: no text has it, no template strips it
# For a tokenizer of bytes, which has no template of its own: role and content, each turn ended by the end token.
BYTE_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ':\\n' + message['content'] + eos_token + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:\\n' }}{% endif %}"
)


class Tokens(NamedTuple):
    """One document: token ids and the labels they are learned with (`IGNORE` where not), int32, equal in length."""

    ids: np.ndarray
    labels: np.ndarray


def encode(tokenizer: Any, text: str) -> np.ndarray:
    """Encode text without special tokens, int32. Bytes go by numpy: 100 KB take 0.4 ms, ByT5's own loop 106."""
    if isinstance(tokenizer, ByT5Tokenizer):
        raw = np.frombuffer(text.encode("utf-8", "surrogatepass"), dtype=np.uint8)
        return raw.astype(np.int32) + tokenizer.offset
    return np.array(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=np.int32)


def end_of_document(tokenizer: Any) -> int:
    """Give the token that ends a document; ValueError when the tokenizer has none."""
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"{type(tokenizer).__name__} has no end-of-text token to end documents with. Set tokenizer.eos_token."
        )
    return int(tokenizer.eos_token_id)


def padding(tokenizer: Any) -> int:
    """Give the token that fills rows; never seen by a loss."""
    return int(tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id)


def text_encoder(tokenizer: Any) -> Callable[[str], Tokens]:
    """Make the function from text to tokens: every token is learned, the last one ends the document."""
    end = np.array([end_of_document(tokenizer)], dtype=np.int32)

    def encode_text(text: str) -> Tokens:
        if not isinstance(text, str):
            raise ValueError(f"a document is {type(text).__name__}, expected text. Set data.column.")
        ids = np.concatenate([encode(tokenizer, text), end]) if text else end[:0]
        return Tokens(ids, ids)

    return encode_text


def chat_encoder(tokenizer: Any) -> Callable[[list[dict[str, Any]]], Tokens]:
    """Make the function from messages to tokens, by the tokenizer's chat template, the assistant's turns as labels.

    A turn is what the template adds to the text before it (with the generation prompt), so that any template serves
    whose text of n messages begins with its text of n - 1. Raises ValueError for one that does not, and without a
    template.
    """
    template = tokenizer.chat_template or (BYTE_TEMPLATE if isinstance(tokenizer, ByT5Tokenizer) else None)
    if template is None:
        raise ValueError(
            f"data=chat needs a chat template, and {type(tokenizer).__name__} has none. Use the tokenizer of an "
            "instruction-tuned model (model.tokenizer=ID_OR_FOLDER), or data=text."
        )

    def render(messages: list[dict[str, Any]], prompt: bool = False) -> str:
        return tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=prompt
        )

    def encode_chat(messages: list[dict[str, Any]]) -> Tokens:
        spans, done = [], 0  # (text, learned)
        text = render(messages)
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            # No template renders a chat of no messages: of an answer that comes first, what stands before its content.
            before = render(messages[:index], prompt=True) if index else render([{**message, "content": _MARK}])
            start = len(_prefix(text, before.partition(_MARK)[0], index))
            stop = start + len(_prefix(text, render(messages[: index + 1]), index)[start:].rstrip())
            spans += [(text[done:start], False), (text[start:stop], True)]
            done = stop
        spans.append((text[done:], False))
        return _join(tokenizer, spans)

    return encode_chat


def _prefix(text: str, prefix: str, index: int) -> str:
    if not text.startswith(prefix):
        raise ValueError(
            f"the chat template rewrites earlier turns when message {index + 1} is added, so that the assistant's "
            "tokens cannot be told apart. Use a template that only appends, or data=text with the rendered chats."
        )
    return prefix


def _join(tokenizer: Any, spans: list[tuple[str, bool]]) -> Tokens:
    """Encode spans of one text, learned or not; a token that straddles spans belongs to where it begins."""
    if getattr(tokenizer, "is_fast", False):
        found = tokenizer(
            "".join(text for text, _ in spans), add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        ids = np.array(found["input_ids"], dtype=np.int32)
        ends = np.cumsum([len(text) for text, _ in spans])
        which = np.searchsorted(ends, [start for start, _ in found["offset_mapping"]], side="right")
        learned = np.array([learned for _, learned in spans], dtype=bool)[np.minimum(which, len(spans) - 1)]
    else:
        parts = [_encode_special(tokenizer, text) for text, _ in spans]
        ids = np.concatenate(parts)
        learned = np.concatenate([np.full(len(x), on) for x, (_, on) in zip(parts, spans, strict=True)])
    return Tokens(ids, np.where(learned, ids, IGNORE).astype(np.int32))


def _encode_special(tokenizer: Any, text: str) -> np.ndarray:
    """Encode text in which special tokens stand spelled out, as templates write them."""
    return np.array(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=np.int32)


def check_chat(messages: Any, where: str) -> None:
    """Raise ValueError unless `messages` is a chat with something to learn."""
    fine = (
        isinstance(messages, list)
        and messages
        and all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
            for m in messages
        )
    )
    if not fine:
        raise ValueError(
            f"{where}: expected a list of messages, each with text in 'role' and 'content', such as "
            '[{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}].'
        )
    if not any(m["role"] == "assistant" and m["content"] for m in messages):
        raise ValueError(
            f"{where}: no assistant turn, so nothing to learn (roles: {', '.join(m['role'] for m in messages)}). "
            "Remove the chat, or give its answers the role 'assistant'."
        )
