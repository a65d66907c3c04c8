"""Tercet's models in other people's libraries, and theirs here."""
