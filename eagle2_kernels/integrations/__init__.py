"""The operators inside other people's engines; nothing here is imported by the package itself."""
