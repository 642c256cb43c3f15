"""How are rows written and read? A file a format; `registry.builtin_row_formats` names them."""
