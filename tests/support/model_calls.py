"""What clients of OpenAI and Anthropic ask of a gateway. Prints what each call gave, one line of JSON each."""

from __future__ import annotations

import json
import sys

import anthropic
import httpx
import openai

SAID = [{"role": "user", "content": "hello"}]


def show(call: str, value: object) -> None:
    print(json.dumps({"call": call, "gave": value}), flush=True)


def of_openai() -> None:
    client = openai.OpenAI(max_retries=0)
    show("chat", client.chat.completions.create(model="m", messages=SAID).choices[0].message.content)
    for part in client.chat.completions.create(model="m", messages=SAID, stream=True):
        if text := part.choices[0].delta.content:
            show("chat stream", text)
            sys.stdin.readline()  # the model says no more until we have shown this
    show("responses", client.responses.create(model="m", input="hello").output_text)
    show("input tokens", client.responses.input_tokens.count(model="m", input="hello").input_tokens)
    show("models", [model.id for model in client.models.list()])
    try:
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "\udc80"}])
    except openai.BadRequestError as error:
        show("surrogate", "lone surrogate" in str(error))
    except UnicodeEncodeError:
        show("surrogate", True)  # the client itself refuses it


def of_anthropic() -> None:
    client = anthropic.Anthropic(max_retries=0)
    show("count tokens", client.messages.count_tokens(model="m", messages=SAID).input_tokens)
    betas = ["interleaved-thinking-2025-05-14", "b" * 2000]
    show("beta", client.beta.messages.create(model="m", max_tokens=9, messages=SAID, betas=betas).content[0].text)
    with client.messages.stream(model="m", max_tokens=9, messages=SAID) as stream:
        show("messages stream", "".join(stream.text_stream))
    try:
        client.messages.create(model="m", max_tokens=9, messages=SAID, extra_headers={"anthropic-beta": "b" * 8001})
    except anthropic.BadRequestError as error:
        show("too long", "anthropic-beta" in str(error))
    hello = httpx.get(str(client.base_url).rstrip("/") + "/api/hello", headers={"x-api-key": client.api_key})
    show("hello", hello.status_code)


of_openai()
of_anthropic()
