"""CommandLine: base of all commands, with `-h`, plain help, and options from the environment.

Every option can also be given as an environment variable: ``BATON_`` and the option's name in
capitals. A BatonError ends a command with one line that names options as users write them.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import typer
import typer.core
from typer import BadParameter

from baton.api.errors import BatonError
from baton.cli.config_file import flag_of, place_of
from baton.cli.declared import with_declared_options
from baton.cli.errors import CommandError
from baton.processes.child_processes import ENVIRONMENT_PREFIX
from baton.version import __version__

EPILOG = (
    "Every option can also be given as an environment variable: --max-model-len as "
    f"{ENVIRONMENT_PREFIX}_MAX_MODEL_LEN."
)
HELP_NAMES = ["-h", "--help"]
_TAKES_ALL_OPTIONS = "takes_all_options"
_HELP_SETTINGS = {"help_option_names": HELP_NAMES}


def takes_all_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Let a command take options that it does not have, as words of its last argument."""
    setattr(command, _TAKES_ALL_OPTIONS, True)
    return command


def with_option_names(text: str, names: Mapping[str, str]) -> str:
    """Replace names of fields in an error's text by options: max_model_len by --max-model-len.

    Args:
        names: name of a field -> the option as the user wrote it.
    """

    def option(found: re.Match[str]) -> str:
        return names.get(found[0], found[0])

    # A name of a single word may be an ordinary word, so it is replaced only at the beginning.
    text = text.removeprefix("structured_output.")  # its fields are the options' names
    return re.sub(r"^[a-z]\w*(?=: )|\b[a-z][a-z0-9]*(?:_[a-z0-9]+)+\b", option, text)


_HYPHEN = "\N{NON-BREAKING HYPHEN}"


class _HelpFormatter(typer.Context.formatter_class):  # type: ignore[misc,valid-type]
    """Help formatter that breaks lines only at spaces, so that option names stay whole."""

    def write_text(self, text: str) -> None:
        super().write_text(text.replace("-", _HYPHEN))

    def write_dl(self, rows: Sequence[tuple[str, str]], *settings: Any, **more: Any) -> None:
        kept = [(first, second.replace("-", _HYPHEN)) for first, second in rows]
        super().write_dl(kept, *settings, **more)

    def getvalue(self) -> str:
        text: str = super().getvalue()
        return text.replace(_HYPHEN, "-")


# Base class of usage errors: Click's own, or that of the copy of Click in newer releases of Typer.
_UsageError: Any = BadParameter.__base__


class OneLineUsageError(BadParameter):
    """A mistake in a command line, which is shown as one line, like all other errors."""

    def show(self, file: Any = None) -> None:
        """Print the mistake and the remedy in one line."""
        from baton.processes.process import print_error  # imported here, since only errors need it

        print_error(self.message)


def _usage_line(error: Any, ctx: Any) -> str:
    """Return one line that names the mistake and the remedy.

    Args:
        error: a usage error of Click.
        ctx: context of the command.
    """
    command = ctx.command_path
    if wrong := getattr(error, "option_name", "") if hasattr(error, "possibilities") else "":
        near = difflib.get_close_matches(wrong, error.possibilities or (), 1)
        remedy = f"is it {near[0]}?" if near else f"see {command} --help"
        return f"{wrong}: {command} of Baton {__version__} has no such option; {remedy}"
    param = getattr(error, "param", None)
    if param is None:
        return f"{error.format_message()} (see {command} --help)"
    name = param.name or ""
    is_option = isinstance(param, typer.core.TyperOption)
    shown = (place_of(ctx, name) or flag_of(name)) if is_option else name.upper()
    if not error.message:  # the required value is missing
        first_sentence = (getattr(param, "help", "") or "").partition(". ")[0]
        wanted = first_sentence.rstrip(".")
        return f"{shown}: must be given: {wanted[:1].lower()}{wanted[1:]} (see {command} --help)"
    why = error.message.removeprefix("Value error, ").replace("Input should", "must", 1)
    return f"{shown}: {why.partition(', unable to parse')[0]}"


class _Context(typer.Context):
    formatter_class = _HelpFormatter


class _Command(typer.core.TyperCommand):
    """A command whose help explains environment variables once, below the options."""

    context_class = _Context

    def __init__(self, name: str | None, **settings: Any) -> None:
        context: dict[str, Any] = {**_HELP_SETTINGS, "auto_envvar_prefix": ENVIRONMENT_PREFIX}
        if hasattr(settings.get("callback"), _TAKES_ALL_OPTIONS):
            context["ignore_unknown_options"] = True
        settings["context_settings"] = context | (settings.get("context_settings") or {})
        settings["epilog"] = settings.get("epilog") or EPILOG
        super().__init__(name, **settings)
        for parameter in self.params:
            if isinstance(parameter, typer.core.TyperOption) and parameter.envvar is None:
                parameter.show_envvar = False

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except CommandError as error:  # the error already names the place in the file
            self._end(error, error.exit_code)
        except _UsageError as error:
            raise OneLineUsageError(_usage_line(error, ctx), ctx) from error

    def invoke(self, ctx: Any) -> Any:
        return self.run_guarded(ctx, super().invoke)

    def run_guarded(self, ctx: Any, run: Callable[[Any], Any]) -> Any:
        """Run a part of this command; print errors in one line each."""
        try:
            return run(ctx)
        except (BatonError, CommandError) as error:
            text = with_option_names(str(error), self._names(ctx))
            self._end(text, getattr(error, "exit_code", 1))

    def _end(self, error: object, exit_code: int) -> NoReturn:
        from baton.processes.process import print_error  # imported here, since only errors need it

        print_error(error)
        raise typer.Exit(exit_code) from None

    def _names(self, ctx: Any) -> dict[str, str]:
        """Return how the user wrote each option (flag, variable, file), by its field's name."""
        names = {
            one.name: place_of(ctx, one.name) or flag_of(one.name)
            for one in self.params
            if one.name is not None and isinstance(one, typer.core.TyperOption)
        }
        for name, declared in getattr(self.callback, "declared", {}).items():
            names.setdefault(declared.path[-1], names[name])
        return names


class CommandGroup(typer.core.TyperGroup):
    """A group of commands, with the help and the errors of `CommandLine`."""

    context_class = _Context

    def __init__(self, **settings: Any) -> None:
        settings["context_settings"] = _HELP_SETTINGS | (settings.get("context_settings") or {})
        super().__init__(**settings)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except _UsageError as error:
            word = args[0]
            if word.startswith("-"):
                raise OneLineUsageError(_usage_line(error, ctx), ctx) from error
            near = difflib.get_close_matches(word, self.list_commands(ctx), 1)
            remedy = f"is it {near[0]}?" if near else f"see {ctx.command_path} --help"
            text = f"{word}: Baton {__version__} has no such command; {remedy}"
            raise OneLineUsageError(text, ctx) from error

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        is_call = bool(args)
        try:
            return super().parse_args(ctx, args)
        except _UsageError as error:
            if not is_call:
                raise  # shows the help
            raise OneLineUsageError(_usage_line(error, ctx), ctx) from error

    def summaries(self, ctx: Any) -> list[tuple[str, str]]:
        """Return (name, first line of help) of each command."""
        found = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        return [(name, (one.help or "").partition("\n\n")[0]) for name, one in found if one]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(self.summaries(ctx))


class CommandLine(typer.Typer):
    """Typer app whose commands print plain help, which narrow terminals do not cut off."""

    def __init__(self, *, cls: type[CommandGroup] = CommandGroup, **settings: Any) -> None:
        super().__init__(cls=cls, rich_markup_mode=None, pretty_exceptions_enable=False, **settings)

    def command(  # type: ignore[override]  # the settings are Typer's
        self, name: str | None = None, **settings: Any
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        register = super().command(name, **{"cls": _Command, **settings})
        return lambda command: register(with_declared_options(command))
