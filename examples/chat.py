"""Chat with a real model in the terminal: `python examples/chat.py`. An empty line or Ctrl-D ends it."""

from __future__ import annotations

import argparse
import sys

from _arguments import load, parser, sampling_params

from pagedjax.loaders import FetchError


def run(options: argparse.Namespace) -> None:
    """Reads a message, streams the answer, remembers both."""
    params = sampling_params(options)
    llm = load(options)
    messages = [{"role": "system", "content": options.system}] if options.system else []
    while True:
        try:
            message = input("you> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            break
        if not message:
            break
        messages.append({"role": "user", "content": message})
        answer = ""
        try:
            for delta in llm.stream(llm.chat_prompt(messages), params):
                print(delta, end="", flush=True)
                answer += delta
        except ValueError as error:  # the conversation no longer fits, say
            messages.pop()
            print(f"error: {error}", file=sys.stderr)
            continue
        print()
        messages.append({"role": "assistant", "content": answer})


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--system", default="", help="a system message; default: the template's own")
    try:
        run(options.parse_args())
    except (ValueError, OSError, FetchError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print()


if __name__ == "__main__":
    main()
