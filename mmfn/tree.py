"""Trees: frozen classes whose fields are leaves or trees, and functions over them.

A tree is a class made by `pytree`, a tuple, a list or a dict of trees, or a leaf. `None` in a field
of a class is an absent subtree: no function here visits it, and `partition` leaves it where the
other half has a leaf. The classes are registered with torch's own pytree, so `torch.func` and
`torch.compile` take them as they are.

Source: Kidger and Garcia 2021, arXiv:2111.00254 (equinox), for the idea.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias, TypeVar, cast, dataclass_transform

import attrs
from torch.utils import _pytree as pytrees

Leaf: TypeAlias = Any
"""A leaf of a tree of weights: a tensor, a `Param`, a placement. One class serves them all."""

Class = TypeVar("Class", bound=type)
Tree = TypeVar("Tree")


def static(default: Any = attrs.NOTHING) -> Any:
    """Make a field of a `pytree` class that is no child: a value that can be hashed and compared.

    Trees differ in structure where it differs.
    """
    return attrs.field(default=default, metadata={"static": True})


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(attrs.field, static))
def pytree(cls: Class) -> Class:
    """Make a frozen class whose fields are the children of a tree node.

    Fields may have defaults. A field made by `static` is no child: a plain value that belongs to
    the structure. Instances can be built, mapped and evolved inside a compiled function, which the
    `__init__` that attrs writes cannot (torch 2.13: it reads a slot descriptor).
    """
    made: Any = attrs.frozen(slots=False, eq=False, init=False)(cls)
    every = attrs.fields(made)
    names = tuple(field.name for field in every if not field.metadata.get("static"))
    fixed = tuple(field.name for field in every if field.metadata.get("static"))
    defaults = {f.name: f.default for f in every if f.default is not attrs.NOTHING}

    def flatten(node: Any) -> tuple[list[Any], tuple[Any, ...]]:
        present = tuple(name for name in names if getattr(node, name) is not None)
        kept = tuple(getattr(node, name) for name in fixed)
        return [getattr(node, name) for name in present], (present, kept)

    def flatten_with_keys(node: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        children, context = flatten(node)
        return list(zip(map(pytrees.GetAttrKey, context[0]), children, strict=True)), context

    def unflatten(children: Any, context: tuple[Any, ...]) -> Any:
        present, kept = context
        node: Any = object.__new__(made)
        for name in names:
            object.__setattr__(node, name, None)
        for name, value in (*zip(present, children, strict=True), *zip(fixed, kept, strict=True)):
            object.__setattr__(node, name, value)
        return node

    # A lambda: checkers of annotations wrap every `def`, and Dynamo cannot look into the wrapper of
    # an `__init__`.
    all_names = tuple(field.name for field in every)
    made.__init__ = lambda node, *args, **kwargs: _set_fields(
        node, all_names, defaults, args, kwargs
    )
    made.__tree_fields__ = names
    made.__static_fields__ = fixed
    pytrees.register_pytree_node(
        made,
        flatten,
        unflatten,
        serialized_type_name=f"{made.__module__}.{made.__qualname__}",
        flatten_with_keys_fn=flatten_with_keys,
    )
    return cast(Class, made)


def _set_fields(
    node: Any,
    names: tuple[str, ...],
    defaults: dict[str, Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Do what the `__init__` of a frozen class does."""
    if len(args) > len(names):
        raise TypeError(f"{type(node).__name__} takes {len(names)} fields, got {len(args)}")
    values = dict(zip(names, args, strict=False))
    for name, value in kwargs.items():
        if name not in names or name in values:
            raise TypeError(f"{type(node).__name__} has no free field {name!r}; it has {names}")
        values[name] = value
    for name in names:
        if name not in values and name not in defaults:
            raise TypeError(f"{type(node).__name__} lacks field {name!r}")
        object.__setattr__(node, name, values[name] if name in values else defaults[name])


def evolve(node: Tree, **changes: Any) -> Tree:
    """Copy a node with some fields replaced."""
    names = (*_fields(node), *getattr(type(node), "__static_fields__", ()))
    if unknown := sorted(changes.keys() - set(names)):
        raise TypeError(f"{type(node).__name__} has no field {unknown[0]!r}; it has {names}")
    copy = object.__new__(type(node))
    for name in names:
        object.__setattr__(copy, name, changes.get(name, getattr(node, name)))
    return copy


def fields(node: Any) -> dict[str, Any]:
    """Give the children of a node by the names of their fields, without absent ones."""
    # No assignment in the expression: torch.compile (2.13) reads a cell that is not yet filled.
    named = [(name, getattr(node, name)) for name in _fields(node)]
    return {name: child for name, child in named if child is not None}


def leaves(tree: Any) -> list[Any]:
    """List the leaves in order, without absent ones."""
    return [leaf for leaf in pytrees.tree_leaves(tree) if leaf is not None]


def path_of(keys: tuple[Any, ...]) -> str:
    """Write a key path of torch's pytree as `text.layers.3.attention.q`."""
    parts = []
    for key in keys:
        match key:
            case pytrees.GetAttrKey(name):
                parts.append(name)
            case pytrees.SequenceKey(index):
                parts.append(str(index))
            case pytrees.MappingKey(name):
                parts.append(str(name))
            case _:
                raise TypeError(f"no path for {key!r}")
    return ".".join(parts)


def items(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield (path, leaf) in order, without absent leaves."""
    flat, _ = pytrees.tree_flatten_with_path(tree)
    return ((path_of(keys), leaf) for keys, leaf in flat if leaf is not None)


def paths(tree: Any) -> list[str]:
    """List the paths of the leaves in order."""
    return [path for path, _ in items(tree)]


def map(fn: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Apply `fn` to each leaf, and to the leaves of `rest` at the same places.

    Raises:
        ValueError: the trees differ in structure.
    """
    flat, structure = pytrees.tree_flatten(tree)
    others = [_flatten_like(structure, other) for other in rest]
    mapped = [None if row[0] is None else fn(*row) for row in zip(flat, *others, strict=True)]
    return pytrees.tree_unflatten(mapped, structure)


def map_with_path(fn: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Apply `fn(path, leaf, ...)` to each leaf.

    Raises:
        ValueError: the trees differ in structure.
    """
    flat, structure = pytrees.tree_flatten_with_path(tree)
    others = [_flatten_like(structure, other) for other in rest]
    mapped = [
        None if leaf is None else fn(path_of(keys), leaf, *row)
        for (keys, leaf), *row in zip(flat, *others, strict=True)
    ]
    return pytrees.tree_unflatten(mapped, structure)


def unflatten(tree: Any, values: list[Any]) -> Any:
    """Put `values` at the leaves of a tree of this structure, in the order of `leaves`.

    Raises:
        ValueError: the counts differ; names both.
    """
    flat, structure = pytrees.tree_flatten(tree)
    count = sum(leaf is not None for leaf in flat)
    if count != len(values):
        raise ValueError(f"a tree of {count} leaves cannot hold {len(values)} values")
    rest = iter(values)
    return pytrees.tree_unflatten(
        [None if leaf is None else next(rest) for leaf in flat], structure
    )


def map_nodes(kind: type, fn: Callable[[Any], Any], tree: Any) -> Any:
    """Put `fn(node)` in the place of each node of a class; other leaves stay as they are."""
    return pytrees.tree_map(
        lambda node: fn(node) if isinstance(node, kind) else node,
        tree,
        is_leaf=lambda node: isinstance(node, kind),
    )


def nodes(kind: type, tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield (path, node) of each node of a class, in order."""
    flat, _ = pytrees.tree_flatten_with_path(tree, is_leaf=lambda node: isinstance(node, kind))
    return ((path_of(keys), node) for keys, node in flat if isinstance(node, kind))


def partition(keep: Callable[[str, Any], bool], tree: Any) -> tuple[Any, Any]:
    """Split a tree in the leaves where `keep(path, leaf)` holds and the others.

    Both halves have the classes of the tree, with `None` where the other has the leaf; `combine`
    puts them together again.
    """
    kept = map_with_path(lambda path, leaf: leaf if keep(path, leaf) else None, tree)
    others = map_with_path(lambda path, leaf: None if keep(path, leaf) else leaf, tree)
    return kept, others


def combine(first: Any, second: Any) -> Any:
    """Put the halves of `partition` together.

    Raises:
        ValueError: a leaf is in both.
    """
    if first is None or second is None:
        return second if first is None else first
    if type(first) is type(second) and (names := _fields(first)):
        both = {name: combine(getattr(first, name), getattr(second, name)) for name in names}
        return evolve(first, **both)
    if isinstance(first, tuple | list) and isinstance(second, tuple | list):
        return type(first)(combine(a, b) for a, b in zip(first, second, strict=True))
    if isinstance(first, dict) and isinstance(second, dict):
        return {key: combine(first.get(key), second.get(key)) for key in first | second}
    raise ValueError(f"both trees have a leaf here: {type(first).__name__}")


def _fields(node: Any) -> tuple[str, ...]:
    """Names of the fields of a tree class, and nothing for any other value."""
    return getattr(type(node), "__tree_fields__", ())


def _flatten_like(structure: Any, tree: Any) -> list[Any]:
    flat, other = pytrees.tree_flatten(tree)
    if other != structure:
        raise ValueError(f"trees differ in structure: {structure} and {other}")
    return flat
