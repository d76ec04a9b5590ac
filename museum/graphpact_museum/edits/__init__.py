"""Edits: how an exhibit or a variant changes a correct plugin, or what is no plugin.

    override    makes a subclass with other methods
    backends    edits of attention backends
    runners     edits of runners
    drivers     edits of graph drivers

Does not: declare an exhibit.
"""
