"""graphpact-scaffold: the template of a plugin's distribution, and the command that renders it.

    cli        `graphpact new`
    rendering  a kind and a name become a folder
    kinds      the seven kinds
    template   the files, for copier

Does not: check a plugin; ``graphpact check`` does.
"""
