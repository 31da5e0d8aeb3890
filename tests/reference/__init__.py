"""Executable specification of the kvrs encoding and of attention over it, in NumPy.

The package knows nothing of the Rust code. `docs/encoding.md` states the same rules in words and
`docs/layouts.md` draws the packed bytes. Every f32 operation here is one NumPy ufunc call, hence one
rounding and never fused.
"""

LAYOUT_VERSION = 1
"""Version of the packed page layout; changing any byte of a packed page changes it."""
