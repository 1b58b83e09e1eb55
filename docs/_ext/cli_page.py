"""The reference of the command line, from its parser."""

from __future__ import annotations


def write_cli_page() -> str:
    """The page as Markdown, with a section for each command."""
    import typer
    from typer.cli import get_docs_for_click
    from typer.main import get_command

    from crossfuse.cli import app

    command = get_command(app)
    text = get_docs_for_click(obj=command, ctx=typer.Context(command), name="crossfuse")
    title = "# The command line\n\n<!-- Written by docs/_ext/cli_page.py from the parser. -->\n"
    codes = (
        "Exit codes: 0 done; 1 a check failed, or the program broke; 2 refused with the reason and "
        "the cure, or called with wrong options.\n"
    )
    return "\n".join([title, codes, text.replace("# `crossfuse`", "## `crossfuse`", 1)])
