"""The `collab` command: hands over to `collab.commands`, or says what to install."""

import importlib
import sys


def main() -> None:
    """Entry point of the `collab` command."""
    try:
        from collab.commands import app

        for name in (
            "analysis_commands", "bench_commands", "report_commands", "train_commands", "evaluate_commands",
            "translate_commands",
        ):  # fmt: skip
            importlib.import_module(f"collab.{name}")  # its commands join those of `app`
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f"collab: the command line needs {error.name}: pip install typer rich (or collab's extra [cli])")
    app()


if __name__ == "__main__":
    main()
