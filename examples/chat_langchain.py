"""LangChain on a private model: a chain of a prompt, the model and a parser, by URL alone.

    python examples/chat_langchain.py

Wants `pip install '.[gateway]' langchain-openai`, and starts `private-llm gateway` with the small model that comes with
the package; LangChain knows it as an OpenAI server.
"""

from __future__ import annotations

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI
from private_llm_gateway.child import child_gateway


def main() -> None:
    """Run one chain at once and streamed: the same text."""
    with child_gateway("", "--name", "private") as gateway:
        model = ChatOpenAI(
            base_url=gateway.openai_url, api_key=gateway.token, model="private", temperature=0, max_completion_tokens=6
        )
        chain = ChatPromptTemplate.from_messages([("user", "The history of the {place}")]) | model | StrOutputParser()

        print("answer:  ", repr(chain.invoke({"place": "city"})))
        print("streamed:", repr("".join(chain.stream({"place": "city"}))))


if __name__ == "__main__":
    main()
