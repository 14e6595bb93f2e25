"""The harness's own command, which knows the model "pagedjax" when it is started from here."""

from __future__ import annotations

from lm_eval.__main__ import cli_evaluate

if __name__ == "__main__":  # the package that this is in has registered the model
    cli_evaluate()
