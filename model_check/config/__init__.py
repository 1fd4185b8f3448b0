"""Config: frozen schema, presets, loading and validation. Imports no torch; reads only the files it is given."""
