//! How a curve becomes a picture.
