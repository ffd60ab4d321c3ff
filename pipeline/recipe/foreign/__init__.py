"""Lists of types as other tools write them: what is read becomes a recipe, and the other way."""
