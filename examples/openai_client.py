"""A conversation with a running `edge-run serve`, by OpenAI's package (pip install openai)."""

import os

from openai import OpenAI

base_url = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8080/v1")
client = OpenAI(base_url=base_url, api_key=os.environ.get("OPENAI_API_KEY", "none"))
fields = {"model": client.models.list().data[0].id, "temperature": 0, "max_tokens": 50, "stream": True}
messages = []
for question in ("list all files of this folder", "only hidden ones"):
    messages.append({"role": "user", "content": question})
    answer = ""
    for chunk in client.chat.completions.create(messages=messages, stream_options={"include_usage": True}, **fields):
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
            answer += choice.delta.content or ""
    messages.append({"role": "assistant", "content": answer})
    print(f"\n({chunk.usage.prompt_tokens_details.cached_tokens} of {chunk.usage.prompt_tokens} tokens were cached)")
