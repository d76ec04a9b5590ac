"""What changed between two releases of an engine, for those who build on it.

    sources      the Python files of a release, in a wheel or a folder
    surface      classes and functions that others build on, read from these files
    changes      two surfaces compared
    uses         what of a surface a package uses
    engine       an engine and its surface
    comparison   two releases compared, and written
    command      the command ``diff`` of an integration

Does not: import an engine or the package; their files are only read.
"""
