"""The museum: real bugs of real engines, each planted in a plugin that is otherwise right.

The suite has to catch every exhibit under its own rule, and to pass every variant, which is right in another
style. A rule without an exhibit is not trusted.

Does not: belong to what a plugin is checked with; it checks the suite.
"""
