"""What is refused of a model file, and where: `model.onnx:12` is the twelfth node of its graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shardwright.compiler.diagnostics import DiagnosticError, ImportRuleError, Loc
from shardwright.compiler.frontend.graphs.form import Form
from shardwright.compiler.frontend.graphs.graph import Model, Node
from shardwright.compiler.frontend.locations import MODULE_FILE


def _again(form: Form) -> str:
    return f"export the model again, and {form.check}"


def damaged(given: str, form: Form, at: Loc | None = None) -> ImportRuleError:
    """The error of a file that is not read."""
    return ImportRuleError(
        "SW_MODEL_FILE",
        f"a whole {form.name} model is required, got {given}",
        at or Loc(MODULE_FILE),
        _again(form),
    )


def untyped(what: str, given: str) -> ImportRuleError:
    """The error of a value whose type has no counterpart."""
    return ImportRuleError(
        "SW_MODEL_TYPE",
        f"{what} requires a tensor of numbers, got {given}",
        Loc(MODULE_FILE),
        "no engine has such values: keep that part of the model out of what is exported",
    )


def unfit(required: str, given: str) -> ImportRuleError:
    """The error of a node whose operands or attributes are not what its operator takes."""
    return ImportRuleError("SW_MODEL_NODE", f"requires {required}, got {given}")


def of_values(what: str) -> ImportRuleError:
    """The error of a node that needs a value which only a run has."""
    return ImportRuleError(
        "SW_MODEL_VALUES",
        f"requires {what} to be known while the model is compiled, got a value that depends on its"
        " inputs or weights",
        hint="shapes are fixed on the machine: export with that number as a constant, or with"
        " operators whose results have one shape (Where in place of If or NonZero)",
    )


@contextmanager
def at_node(model: Model, node: Node) -> Iterator[None]:
    """Say the place of a node in errors that have none; what NumPy and JAX raise of operands that
    do not fit each other becomes an error of the node."""
    scope, hint = node.scope, _again(model.form)
    loc = Loc(model.file, node.number, scope)
    try:
        yield
    except DiagnosticError as error:
        d = error.diagnostic
        if d.loc is not None:
            raise
        raise type(error)(d.code, f"{scope}: {d.message}", loc, d.hint or hint) from error
    except NotImplementedError as error:
        raise ImportRuleError(
            "SW_MODEL_OPERATOR",
            f"{scope}: requires a form with a row, got {error}",
            loc,
            f"export the model with other operators ({model.form.page} lists the rows)",
        ) from error
    except (TypeError, ValueError, IndexError, KeyError, OverflowError, MemoryError) as error:
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ImportRuleError(
            "SW_MODEL_NODE",
            f"{scope}: requires operands and attributes that fit each other, got: {said}",
            loc,
            hint,
        ) from error
