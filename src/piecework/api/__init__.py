"""What callers use: programs of models given as objects, and of model folders."""
