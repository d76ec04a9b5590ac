"""Edits: functions that change a correct plugin, or code outside plugins, for an exhibit or a variant.

    override    makes a subclass with other methods
    backends    edits of attention backends
    runners     edits of runners
    drivers     edits of graph drivers

Does not: declare an exhibit.
"""
