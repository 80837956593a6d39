"""The official OpenAI client, unchanged, talks to a private model: a streamed answer, and what it cost.

    python examples/chat_openai.py

Wants `pip install '.[gateway]' openai`, and starts `private-llm gateway` with the small model that comes with the
package. If a gateway runs already, the two arguments of `OpenAI(...)` are all that a program needs.
"""

from __future__ import annotations

from openai import OpenAI
from private_llm_gateway.child import child_gateway

QUESTION = "The history of the city begins with"


def main() -> None:
    """Ask once, and print the answer as it comes."""
    with child_gateway() as gateway:
        client = OpenAI(base_url=gateway.openai_url, api_key=gateway.token)
        model = client.models.list().data[0].id
        print("model: ", model)

        print("answer: ", end="")
        usage = spent = None
        stream = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": QUESTION}],
            max_tokens=8,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        for chunk in stream:
            if chunk.choices:
                print(chunk.choices[0].delta.content or "", end="", flush=True)
            usage = chunk.usage or usage
            spent = getattr(chunk, "private_llm", None) or spent  # totals so far, of this gateway alone
        if usage is None or spent is None:
            raise SystemExit("the answer ended before its costs came")
        print(f"\nusage:  {usage.prompt_tokens} tokens of prompt, {usage.completion_tokens} new ones")
        print(f"cost:   {spent['bytes'] / 1e6:.2f} MB over all links, {spent['rounds']} rounds")


if __name__ == "__main__":
    main()
