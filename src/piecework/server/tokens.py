"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

from fastapi import APIRouter

from piecework.server.answers import Prompt, Tokens
from piecework.server.chat import render
from piecework.server.front import REFUSALS, Front
from piecework.server.requests import DetokenizeBody, TokenizeBody


def make_router(front: Front) -> APIRouter:
    """Return the routes."""
    router = APIRouter(tags=["tokens"], responses=REFUSALS)

    @router.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> Tokens:
        """Return the token ids of a prompt, or of a conversation as the chat template writes it."""
        front.check_model(body.model)
        model = front.model
        if body.messages is not None:
            text = await render(front, body.messages, body.add_generation_prompt, {})
            ids = await model.words.encode(text, add_special_tokens=False)
        else:
            ids = await model.words.encode(body.prompt or "", add_special_tokens=body.add_special_tokens)
        texts = [model.words.token_text(token) for token in ids] if body.return_token_strs else None
        return Tokens(count=len(ids), max_model_len=model.max_length, tokens=ids, token_strs=texts)

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> Prompt:
        """Return the text of token ids."""
        front.check_model(body.model)
        words = front.model.words
        return Prompt(prompt=await words.decode(body.tokens, skip_special_tokens=body.skip_special_tokens))

    return router
