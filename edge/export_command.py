"""stub"""
def export() -> None: "x"
