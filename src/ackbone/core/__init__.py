"""Values and ports. Imports the standard library and msgspec only; everything else imports this."""
