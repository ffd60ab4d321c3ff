"""Tables, charts, inventory: results as data first, rendering after. Computes nothing new."""
