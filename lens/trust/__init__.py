"""How far a lens can be trusted on one model, told on one page that can be sent away."""
