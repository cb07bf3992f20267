"""Cases that the tester leaves out.

An integer must fit into 64 bits, a number with a fraction or an exponent need not. To a JSON schema both are numbers, so
the document gives the bounds of integers for all, and a float beyond them is no example of a bad request.
"""

import schemathesis


def has_large_float(value):
    if isinstance(value, float):
        return abs(value) >= 2**63
    if isinstance(value, dict):
        return any(has_large_float(item) for item in value.values())
    return isinstance(value, list) and any(has_large_float(item) for item in value)


@schemathesis.hook
def filter_case(context, case):
    return not has_large_float(case.body)
