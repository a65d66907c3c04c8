"""The version of this package, in a module without imports so that every other module can read it."""

__version__ = "0.2.0"
