"""Hear every call of a module and answer it, whether or not it goes past the module's hooks."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

Before = Callable[[nn.Module, Any, Any], Any]
"""(module, args, kwargs) -> None, or other (args, kwargs)."""

After = Callable[[nn.Module, Any, Any], Any]
"""(module, args, output) -> None, or another output."""


@contextmanager
def listening(
    modules: Iterable[nn.Module],
    before: Before,
    after: After,
    *,
    past_hooks: bool = False,
    first: bool = False,
) -> Iterator[None]:
    """Within: `before` and `after` are called around each module's forward. After: as it was.

    Hooks hear it, as a rule. `past_hooks` wraps `forward` itself: SqueezeBERT calls
    `layer.forward(...)`, where no hook fires. With `first`, `after` hears an output before hooks
    that stand already.
    """
    undo: list[Callable[[], Any]] = []
    try:
        for module in modules:
            if past_hooks:
                undo.append(_wrap(module, before, after))
            else:
                undo.append(module.register_forward_pre_hook(before, with_kwargs=True).remove)
                undo.append(module.register_forward_hook(after, prepend=first).remove)
        yield
    finally:
        for step in reversed(undo):
            step()


def _wrap(module: nn.Module, before: Before, after: After) -> Callable[[], None]:
    own, original = vars(module), module.forward
    was_own = "forward" in own

    def _heard(*args: Any, **kwargs: Any) -> Any:
        changed = before(module, args, kwargs)
        if changed is not None:
            args, kwargs = changed
        output = original(*args, **kwargs)
        answer = after(module, args, output)
        return output if answer is None else answer

    def _undo() -> None:
        if was_own:
            own["forward"] = original
        else:
            own.pop("forward", None)

    own["forward"] = _heard
    return _undo
