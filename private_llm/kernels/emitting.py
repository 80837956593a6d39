"""Functions of kernels whose instructions are written here, where Numba would not make them."""

from collections.abc import Callable, Sequence
from inspect import Parameter, Signature
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

I8, I32, I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
ADDRESS = types.intp
ZERO, ARRAY = "zero", "array"
"""Arguments of any type of elements, given as its bits, and arrays or None, given as the address of the first element.
"""
IrValue = Any
Type = Any
Function = Any  # without types of their own: llvmlite's instructions and builders, Numba's types, and kernels


def emitted(*kinds: Type, returns: Type = types.void) -> Callable[[Callable[..., IrValue]], Function]:
    """A function of kernels with these types; the decorated one writes its instructions, of builder and arguments."""

    def of(write: Callable[..., IrValue]) -> Function:
        def typed(_: object, *given: Type) -> tuple[Type, Callable[..., IrValue]]:
            def codegen(context: Type, builder: IrValue, _: object, values: Sequence[IrValue]) -> IrValue:
                seen = []
                for kind, each, value in zip(kinds, given, values, strict=True):
                    if each is types.none:
                        value = None
                    elif kind == ARRAY:
                        value = context.make_array(each)(context, builder, value).data
                    seen.append(each.bitwidth if kind == ZERO else value)
                made = write(builder, *seen)
                return context.get_dummy_value() if returns is types.void else made

            taken = [each if kind in (ZERO, ARRAY) else kind for kind, each in zip(kinds, given, strict=True)]
            return returns(*taken), codegen

        names = ("context", *(f"a{number}" for number in range(len(kinds))))
        typed.__name__, typed.__doc__ = write.__name__, write.__doc__
        typed.__signature__ = Signature([Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names])  # type: ignore[attr-defined]
        return intrinsic(typed)

    return of


def known(builder: IrValue, name: str, returns: ir.Type, *operands: ir.Type) -> IrValue:
    """LLVM's function of this name, declared once a module."""
    found = builder.module.globals.get(name)
    return found or ir.Function(builder.module, ir.FunctionType(returns, operands), name)


def pointer(builder: IrValue, address: IrValue, kind: ir.Type) -> IrValue:
    """A number as a pointer."""
    return builder.inttoptr(address, kind.as_pointer())


def shuffled(builder: IrValue, places: Sequence[int], first: IrValue, other: IrValue | None = None) -> IrValue:
    """Elements of a vector, and from its length on of another one, at these places."""
    mask = ir.Constant(ir.VectorType(I32, len(places)), list(places))
    return builder.shuffle_vector(first, ir.Constant(first.type, ir.Undefined) if other is None else other, mask)


def loop(builder: IrValue, count: IrValue, step: int, body: Callable[[IrValue], IrValue]) -> IrValue:
    """Instructions for k = 0, step, .. below `count`, at least once. Returns what the body gives."""
    entry = builder.block
    start, done = builder.append_basic_block("step"), builder.append_basic_block("done")
    builder.branch(start)
    builder.position_at_end(start)
    k = builder.phi(I64)
    k.add_incoming(I64(0), entry)
    made = body(k)
    following = builder.add(k, I64(step))
    k.add_incoming(following, builder.block)
    builder.cbranch(builder.icmp_signed("<", following, count), start, done)
    builder.position_at_end(done)
    return made
