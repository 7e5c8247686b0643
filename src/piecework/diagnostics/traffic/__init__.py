"""Traffic: a model of the bytes that a step moves, made from the traced graph; it explains, it does not measure."""
