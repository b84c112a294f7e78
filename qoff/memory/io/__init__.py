"""Moving bytes: disk reads, copies between tiers, transfers to the device."""
