#![doc = include_str!("../README.md")]

pub mod acceptance;
pub mod admission;
pub mod bounds;
pub mod catalog;
pub mod citations;
pub mod contract;
pub mod managed;
pub mod neutral;
pub mod outcome;
pub mod owned;
