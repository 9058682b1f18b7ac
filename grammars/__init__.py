"""The grammar of the language, and the parser table made from it.

To build the LALR(1) table takes a third of a second, too long for every `check`: `make grammar` writes it, and commands
need no parser generator. The format of par.json:

    words     text of a keyword or punctuation mark -> name of its terminal
    patterns  [name, regular expression] of the other terminals
    ignored   the names of the terminals that are skipped
    rules     [builder, length, kept]: what a reduction builds ("" inlines its parts into the enclosing rule, "?"
              passes its only part on), how many symbols it pops off the stack, and which of them are its parts
    origins   the nonterminal that each rule reduces to
    states    symbol -> state to go to (0 or more) or rule to reduce, as -1 - rule; one mapping per state
    starts    start symbol -> [first state, last state]
"""
