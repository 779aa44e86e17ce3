"""`baton doctor`: the command."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Annotated

import typer

from baton.cli.admin.connection import ExitCode
from baton.cli.admin.output import escape, make_console, make_grid, print_json
from baton.cli.doctor import installation, machine
from baton.cli.doctor.finding import Finding, Grade
from baton.kernel_library.state import find_kernels

_STYLES = {Grade.OK: "green", Grade.SLOW: "yellow", Grade.BAD: "red"}


def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Show what this machine offers Baton, with advice for what is missing.

    Starts and builds nothing. Exit code 1 if something keeps `baton up` from working.
    """
    findings = list(look())
    is_bad = any(one.grade is Grade.BAD for one in findings)
    if json:
        plain = [dataclasses.asdict(one) | {"grade": one.grade.value} for one in findings]
        print_json({"is_ready": not is_bad, "findings": plain})
    else:
        _print(findings)
    raise typer.Exit(ExitCode.ERROR if is_bad else ExitCode.OK)


def look() -> Iterator[Finding]:
    """Run all checks, the most basic checks first."""
    kernels = find_kernels()
    yield installation.look_at_packages()
    yield machine.look_at_cpu()
    yield machine.look_at_cores()
    yield machine.look_at_memory()
    yield machine.look_at_gpus(installation.version_of("torch"))
    yield installation.look_at_compiler(kernels)
    yield installation.look_at_kernels(kernels)
    yield installation.look_at_cache()
    yield machine.look_at_huge_pages()
    yield machine.look_at_shared_memory()
    yield machine.look_at_network()
    yield machine.look_at_descriptors()
    yield installation.look_at_ports()


def _print(findings: list[Finding]) -> None:
    grid = make_grid()
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for one in findings:
        style = _STYLES[one.grade]
        grid.add_row(f"[{style}]{one.grade.value}[/]", one.part, escape(one.value))
        if one.advice:
            grid.add_row("", "", f"[dim]{escape(one.advice)}[/]")
    console = make_console()
    console.print(grid)
    console.print(escape(conclusion(findings)))


def conclusion(findings: Sequence[Finding]) -> str:
    """Say in one line whether `baton up` works here, and which parts prevent or slow it."""
    bad, slow = (
        ", ".join(one.part for one in findings if one.grade is grade)
        for grade in (Grade.BAD, Grade.SLOW)
    )
    if bad:
        return f"baton up does not work here yet: {bad}"
    return f"baton up works here, slower than it could: {slow}" if slow else "baton up works here"
