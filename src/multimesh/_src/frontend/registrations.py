"""Registrations: which scopes are tasks, as users register them.

A registration is a regular expression and what it means: a callback, a `Task`, or layers spread
over stages. It is searched in prefixes of an equation's path; `touch` says whether it matches.
"""

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from multimesh._src.errors import MatchError, message
from multimesh._src.frontend.tasks import Task
from multimesh._src.stages import LayerStages

Callback: TypeAlias = Callable[[str, bool], Task | None]

_DIGITS = re.compile(r"\d+")


@dataclass(frozen=True, slots=True, eq=False)
class Registration:
    """One registered matcher.

    `answers` keeps what the callback returned per (matched text, backprop): it is called once.
    `num_layers` is 0 but for `register_layers`.
    """

    matcher: str  # as the user wrote it
    pattern: re.Pattern[str]
    callback: Callback
    scanned: bool
    where: str  # the user's file and line
    num_layers: int = 0
    answers: dict[tuple[str, bool], Task | None] = field(default_factory=dict)

    def touch(self, path: tuple[str, ...]) -> str | None:
        """Returns the matched text if some match touches the last component of `path`.

        The text is the first group, or the whole match where there is no group or it took no part.
        A match that starts or ends inside a run of digits does not count: `layer1` is not in
        `layer10`.
        """
        text = "/".join(path)
        last = len(text) - len(path[-1])
        for match in self.pattern.finditer(text):
            start, end = match.span()
            cut = _cuts_digits(text, start) or _cuts_digits(text, end)
            if end > max(start, last) and not cut:
                return (match.group(1) if self.pattern.groups else None) or match.group()
        return None

    def task_of(self, text: str, backprop: bool) -> Task | None:
        """Returns what the callback says of a matched text; None means "not a task".

        Raises:
            MatchError: The callback returns something else.
        """
        key = (text, backprop)
        if key not in self.answers:
            try:
                answer = self.callback(text, backprop)
            except Exception as error:
                if not self.num_layers:  # else the callback is ours and says where
                    error.add_note(
                        f"The callback of matcher `{self.matcher}` raised this for `{text}` "
                        f"(backprop=`{backprop}`); it was registered at {self.where}."
                    )
                raise
            if answer is not None and not isinstance(answer, Task):
                raise MatchError(
                    message(
                        f"The callback of matcher `{self.matcher}` returned `{answer!r}` for "
                        f"`{text}` (backprop=`{backprop}`).",
                        where=self.where,
                        ways=(
                            "return a `Task`.",
                            "return `None` where the scope is not a task.",
                        ),
                    )
                )
            self.answers[key] = answer
        return self.answers[key]

    def missing_layers(self, texts: Iterable[str]) -> tuple[int, ...]:
        """Returns the numbers of the registered layers that no matched text has."""
        found = {int(_DIGITS.findall(text)[-1]) for text in texts} if self.num_layers else set()
        return tuple(number for number in range(self.num_layers) if number not in found)

    def __str__(self) -> str:
        return f"`{self.matcher}` registered at {self.where}"


def _cuts_digits(text: str, at: int) -> bool:
    return 0 < at < len(text) and text[at - 1].isdigit() and text[at].isdigit()


def make_registration(
    matcher: str, callback: Callback | None, task: Task | None, scanned: bool
) -> Registration:
    """Makes a registration of what a user gave.

    Raises:
        MatchError: Both or none of callback and task, or the matcher is no regular expression.
    """
    if (callback is None) == (task is None):
        given = "neither" if task is None else "both"
        raise MatchError(
            message(
                f"Matcher `{matcher}` has {given} of `callback` and `task`.",
                ways=("give `callback=`, a function from the matched text.", "give `task=`."),
            )
        )
    if task is not None and not isinstance(task, Task):
        raise MatchError(f"Matcher `{matcher}` has `task={task!r}`, which is no `Task`.")
    if callback is not None and not callable(callback):
        raise MatchError(f"Matcher `{matcher}` has `callback={callback!r}`, which is no function.")
    where = user_line()
    if callback is not None:
        _check_takes_two(callback, matcher, where)
    answer = callback if callback is not None else lambda text, backprop: task
    return Registration(matcher, _compiled(matcher), answer, bool(scanned), where)


def _check_takes_two(callback: Callback, matcher: str, where: str) -> None:
    try:
        signature = inspect.signature(callback)
    except (TypeError, ValueError):  # builtins
        return
    try:
        signature.bind("", False)
    except TypeError as error:
        raise MatchError(
            message(
                f"The callback of matcher `{matcher}` takes `{signature}`, but is called as "
                f"`callback(text, backprop)`: {error}.",
                where=where,
                ways=(
                    "let it take the matched text and whether the scope is one of the backward "
                    "pass, as `lambda text, backprop: Task(...)`.",
                ),
            )
        ) from None


def make_layer_registration(
    matcher: str, stages: LayerStages, axis: str, scanned: bool
) -> Registration:
    """Makes the registration of `register_layers`: the layer's stage and its slice of `axis`."""
    where = user_line()

    def callback(text: str, backprop: bool) -> Task:
        del backprop
        digits = _DIGITS.findall(text)
        if not digits:
            raise MatchError(
                message(
                    f"The text `{text}` that matcher `{matcher}` found has no layer number.",
                    where=where,
                    ways=(
                        "let the first group of the matcher hold it, as `(layer\\d+)`.",
                        "give `scanned=True` if the layers are iterations of a scan.",
                    ),
                )
            )
        here = f"`{text}`, found by `{matcher}` registered at {where}"
        stage = stages.stage_of(int(digits[-1]), here)
        return Task(mesh_slice={axis: stages.rank_of(stage)}, stage=stage)

    return Registration(
        matcher, _compiled(matcher), callback, bool(scanned), where, stages.num_layers
    )


def _compiled(matcher: str) -> re.Pattern[str]:
    if not isinstance(matcher, str) or not matcher:
        raise MatchError(f"A matcher is a regular expression, not `{matcher!r}`.")
    try:
        return re.compile(matcher)
    except re.error as error:
        raise MatchError(f"Matcher `{matcher}` is no regular expression: {error}.") from error


def user_line() -> str:
    """Returns the file and line that called into this package."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and _is_ours(frame.f_globals):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _is_ours(names: Mapping[str, Any]) -> bool:
    return str(names.get("__name__", "")).startswith("multimesh.")
