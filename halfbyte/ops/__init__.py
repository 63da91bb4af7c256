"""What every op means, in torch; its contract; and the choice of its kernel."""
