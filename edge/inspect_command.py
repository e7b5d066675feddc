"""stub"""
def inspect() -> None: "x"
