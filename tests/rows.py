"""Single rows of tables, and single verdicts on them."""

from rankbench.judging import judge


def pick(table, **wanted):
    """The rows with these values."""
    for column, value in wanted.items():
        table = table[table[column] == value]
    return table


def verdict(name, table, facet=None):
    """The only verdict of a claim on a table."""
    (row,) = judge(name, table, facet)
    return row
