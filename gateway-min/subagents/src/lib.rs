#![doc = include_str!("../README.md")]

pub mod admission;
pub mod catalog;
pub mod managed;
