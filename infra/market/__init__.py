"""The exchanges of Taiwan: their hours and symbols."""
