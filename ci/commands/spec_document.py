"""kvspec spec: the specification as a document, generated from the code; and what was found in releases."""

from pathlib import Path

import click

from ci.commands.shared import Unusable, unusable, write_file
from stateful_tests.lockstep.exit_codes import Ending


@click.command()
@click.option("--out", metavar="FILE", help="The file to write. [default: stdout]")
@click.option(
    "--html", is_flag=True, help="One self-contained page, with all drawings and findings."
)
@click.option("--findings", is_flag=True, help="Print the bugs of real releases instead.")
@click.option(
    "--reference", is_flag=True, help="Print instead what the specification has by name alone."
)
@click.option(
    "--check", is_flag=True, help="Exit with 1 when FILE (by default the document's) is out of date."
)
def spec(out: str | None, html: bool, findings: bool, reference: bool, check: bool) -> int:
    """Print the specification, which is generated from code."""
    from ci.documents import findings as found
    from ci.documents import spec as document

    if findings and reference:
        raise Unusable("--findings goes without --reference: each is a document")
    usual = document.ROOT / (document.REFERENCE if reference else "SPEC.md")
    if out is not None:
        path = Path(out)
    else:
        path = found.PATH if findings else usual
    if html and (check or findings or reference):
        other = "findings" if findings else "reference"
        raise Unusable(f"--{'check compares SPEC.md: it' if check else other} goes without --html")
    if check and not path.is_file():
        raise Unusable(f"--check: there is no {path}; --out FILE names another")
    with unusable("spec: ", document.NotShown):
        if findings:
            text = found.text()
        elif reference:
            text = document.reference_text()
        else:
            text = document.text(full=html)
    if html:
        from ci.documents.html_page import page

        text = page(text, document.anchor)
    if check:
        if path.read_bytes() == text.encode():
            return Ending.CONFORMS
        option = ""
        if findings:
            option = "--findings "
        elif reference:
            option = "--reference "
        click.echo(f"{path} is not what the code says: kvspec spec {option}--out {path}")
        return Ending.VIOLATED
    if out is None:
        click.echo(text, nl=False)
    else:
        write_file(path, text, "--out")
    return Ending.CONFORMS
