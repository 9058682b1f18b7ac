"""Translation validation of compiled programs, and the proxies that `partita verify` runs."""
